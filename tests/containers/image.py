"""Images for containers, made without a network out of programs of this machine."""

from __future__ import annotations

import hashlib
import io
import json
import platform
import shutil
import subprocess
import tarfile
from collections.abc import Mapping
from pathlib import Path

from simhost import SimHost

IMAGE = "localhost/tools:1"
_TOOLS = ("bash", "cat", "env", "id", "ls", "sleep")
_FRONT_END = "nvidia-cuda-mps-control"
_PLATFORM = {
    "os": "linux",
    "architecture": {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine()),
}


def make_tree(tree: Path, host: SimHost) -> None:
    """Copy a shell, some tools and NVIDIA's front-end, with their libraries."""
    for folder in ("bin", "tmp", "etc", "usr/bin"):
        (tree / folder).mkdir(parents=True)
    (tree / "etc/passwd").write_text("root:x:0:0::/:/bin/sh\n")
    programs = [str(shutil.which(tool)) for tool in _TOOLS]
    programs.append(str(shutil.which(_FRONT_END, path=host.env["PATH"])))
    for program in programs:
        shutil.copy(program, tree / "bin")
        told = subprocess.run(["ldd", program], check=True, capture_output=True, text=True).stdout
        for word in told.split():
            if word.startswith("/") and not (tree / word[1:]).exists():
                (tree / word[1:]).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(word, tree / word[1:])
    (tree / "bin/sh").symlink_to("bash")


def write_layer(tree: Path, layer: Path) -> None:
    """Write the tree as a tar file."""
    subprocess.run(["tar", "-C", str(tree), "-cf", str(layer), "."], check=True)


def make_image(folder: Path, host: SimHost) -> Path:
    """The file of the image, made unless it is already there."""
    archive = folder / "image.tar"
    if not archive.exists():
        tree, layer = folder / "tree", folder / "layer.tar"
        make_tree(tree, host)
        write_layer(tree, layer)
        write_image(layer, archive)
    return archive


def write_image(layer_path: Path, archive: Path) -> None:
    """Write an image of one layer as the OCI has it (image-spec, image-layout.md)."""
    layer = layer_path.read_bytes()
    diff_id = f"sha256:{hashlib.sha256(layer).hexdigest()}"
    config = {
        **_PLATFORM,
        "config": {"Cmd": ["sleep", "infinity"], "Env": ["PATH=/bin"]},
        "rootfs": {"type": "layers", "diff_ids": [diff_id]},
    }
    blobs = [layer, _json(config)]
    layer_entry, config_entry = _entry("layer.v1.tar", layer), _entry("config.v1+json", blobs[1])
    manifest = _json({"schemaVersion": 2, "config": config_entry, "layers": [layer_entry]})
    named = {**_entry("manifest.v1+json", manifest), "annotations": {"io.containerd.image.name": IMAGE}}
    files = {
        "oci-layout": _json({"imageLayoutVersion": "1.0.0"}),
        "index.json": _json({"schemaVersion": 2, "manifests": [named]}),
    }
    for blob in (*blobs, manifest):
        files[f"blobs/sha256/{hashlib.sha256(blob).hexdigest()}"] = blob
    archive.write_bytes(_tar(files))


def _entry(kind: str, blob: bytes) -> dict[str, object]:
    digest = f"sha256:{hashlib.sha256(blob).hexdigest()}"
    return {"mediaType": f"application/vnd.oci.image.{kind}", "digest": digest, "size": len(blob)}


def _json(value: object) -> bytes:
    return json.dumps(value).encode()


def _tar(files: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()
