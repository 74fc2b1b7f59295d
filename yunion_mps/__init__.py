"""yunion-mps: NVIDIA MPS as a service."""

import os

__version__ = "0.1.0"
__all__ = ["AsyncClient", "Client", "__version__"]

TYPE_CHECKING = False  # like typing.TYPE_CHECKING, whose import would slow down every start
if TYPE_CHECKING:
    from yunion_mps.client import AsyncClient as AsyncClient
    from yunion_mps.client import Client as Client
else:

    def __getattr__(name: str) -> object:
        """Import a client only if it is used."""
        if name not in ("AsyncClient", "Client"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from yunion_mps import client

        return getattr(client, name)


def version_line(program: str) -> str:
    """Return what --version says: `yunion-mps 0.1.0 (6c4fb29c1d2e)`."""
    return f"{program} {__version__} ({revision()})"


def revision() -> str:
    """Return the git revision: as recorded by scripts/package, or else of the checkout, or else `unknown`."""
    try:
        from yunion_mps._revision import REVISION  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        pass
    else:
        return str(REVISION)
    checkout = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    # In a worktree, `.git` names its own directory, and `commondir` that of all (gitrepository-layout(5)).
    git = os.path.join(checkout, _read(f"{checkout}/.git").removeprefix("gitdir: ") or ".git")
    head = _read(f"{git}/HEAD")
    if head.startswith("ref: "):
        reference = head[len("ref: ") :]
        common = os.path.join(git, _read(f"{git}/commondir"))
        rows = (line.split(" ") for line in _read(f"{common}/packed-refs").splitlines())
        packed = next((row[0] for row in rows if row[1:] == [reference]), "")
        head = _read(f"{common}/{reference}") or packed
    return head[:12] or "unknown"


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().strip()
    except OSError:
        return ""
