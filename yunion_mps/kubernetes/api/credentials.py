"""The API server's address and our credentials for it: a pod's service account, or a kubeconfig file.

Credential plugins that a kubeconfig names are not run.

Source: Kubernetes: Accessing the Kubernetes API from a Pod, section "Directly accessing the REST API"; for a
file, kubeconfig (v1), section "Config" (kubernetes.io/docs/reference/config-api/kubeconfig.v1).
"""

from __future__ import annotations

import base64
import binascii
import os
import ssl
import tempfile
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

import yaml

from yunion_mps.core.errors import YunionError
from yunion_mps.core.paths import Paths
from yunion_mps.core.reasons import API_SERVER_ERROR, hint_of
from yunion_mps.core.text import parse_number

#: The longest part of a host's name between dots (RFC 1035).
_MAX_LABEL = 63
_HTTPS_PORT = 443
_HTTP_PORT = 80


class ApiServerError(YunionError):
    """The API server cannot be reached (`status` 0), or refused a request with an HTTP status."""

    code = API_SERVER_ERROR

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message, hint_of(API_SERVER_ERROR))
        self.status = status


class Access(NamedTuple):
    """What a connection to the API server needs."""

    host: str
    port: int
    #: None for plain HTTP.
    tls: ssl.SSLContext | None
    #: The name in the server's certificate; None for plain HTTP.
    server_name: str | None
    #: The bearer token, empty if a client certificate is used.
    token: str
    #: What precedes all paths.
    prefix: str = ""

    def checked(self, path: str) -> Access:
        """Return this object; raises ApiServerError if a value cannot be in a request or a connection."""
        texts = {
            "host": self.host,
            "path": self.prefix,
            "token": self.token,
            "tls-server-name": self.server_name or "",
        }
        for message, value in texts.items():
            if not value.isascii() or not value.isprintable() or " " in value:
                raise ApiServerError(f"{path}: the {message} contains invalid characters")
        for host in (self.host, self.server_name or "name"):
            labels = host.rstrip(".").split(".")
            if not all(0 < len(label) <= _MAX_LABEL for label in labels):
                raise ApiServerError(f"{path}: {host[:_MAX_LABEL]} is not a host name")
        return self

    @property
    def authority(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class ApiCredentials(Protocol):
    def access(self) -> Access:
        """Read everything again, because tokens and certificates are replaced; raises ApiServerError."""


class ServiceAccount:
    """The credentials of a pod."""

    def __init__(self, host: str, port: int, paths: Paths) -> None:
        self._host = host
        self._port = port
        self._directory = paths.service_account

    def access(self) -> Access:
        token = _read(os.path.join(self._directory, "token")).strip()
        authority = _read(os.path.join(self._directory, "ca.crt"))
        access = Access(
            host=self._host,
            port=self._port,
            tls=_tls_context(authority),
            server_name=self._host,
            token=token,
        )
        return access.checked(self._directory)


class Kubeconfig:
    """The credentials of a kubeconfig file's current context."""

    def __init__(self, path: str) -> None:
        self._path = path

    def access(self) -> Access:
        """Read the server and the user of the current context.

        Raises ApiServerError if the file cannot be used.
        """
        try:
            document = yaml.safe_load(_read(self._path))
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise ApiServerError(f"{self._path} is not YAML: {error}") from None
        try:
            context = _named(document["contexts"], document["current-context"])["context"]
            cluster = _named(document["clusters"], context["cluster"])["cluster"]
            user = {**(_named(document["users"], context["user"])["user"] or {})}
            url = urlsplit(cluster["server"])
            host = url.hostname or ""
            port = url.port
            is_tls = url.scheme == "https"
            unsupported = [key for key in ("exec", "auth-provider") if key in user]
        except (KeyError, TypeError, ValueError, AttributeError):
            message = f"{self._path} has no current context with a cluster, a server and a user"
            raise ApiServerError(message) from None
        if unsupported:
            message = f"{self._path}: {unsupported[0]} is not supported: use a token or a client certificate"
            raise ApiServerError(message)
        access = Access(
            host=host,
            port=port or _HTTP_PORT,
            tls=None,
            server_name=None,
            token=self._text(user, "token", "tokenFile").strip(),
            prefix=url.path.rstrip("/"),
        )
        if is_tls:
            access = access._replace(
                port=port or _HTTPS_PORT,
                tls=self._tls(cluster, user),
                server_name=str(cluster.get("tls-server-name") or host),
            )
        return access.checked(self._path)

    def _tls(self, cluster: Mapping[str, Any], user: Mapping[str, Any]) -> ssl.SSLContext:
        authority = self._text(cluster, "certificate-authority-data", "certificate-authority")
        tls = _tls_context(authority)
        if cluster.get("insecure-skip-tls-verify"):
            tls.check_hostname = False  # first: a context that checks it refuses CERT_NONE
            tls.verify_mode = ssl.CERT_NONE
        certificate = self._text(user, "client-certificate-data", "client-certificate")
        if certificate:
            _load_certificate(tls, certificate, self._text(user, "client-key-data", "client-key"))
        return tls

    def _text(self, members: Mapping[str, Any], inline: str, file: str) -> str:
        """Return the value of `inline`, in base64 if its name ends with -data, or the content of `file`."""
        value = members.get(inline)
        if value and inline.endswith("-data"):
            try:
                return base64.b64decode(value, validate=True).decode()
            except (binascii.Error, ValueError, TypeError):
                raise ApiServerError(f"{self._path}: {inline} is not base64") from None
        if value:
            return str(value)
        path = members.get(file)
        return _read(os.path.join(os.path.dirname(self._path), str(path))) if path else ""


def find_credentials(kubeconfig: str, paths: Paths, environment: Mapping[str, str]) -> ApiCredentials:
    """Return the credentials of the kubeconfig file if one is set, otherwise the pod's.

    Raises ApiServerError if there are none.
    """
    if kubeconfig:
        return Kubeconfig(kubeconfig)
    host = environment.get("KUBERNETES_SERVICE_HOST", "")
    port = parse_number(environment.get("KUBERNETES_SERVICE_PORT", ""))
    if host and port is not None:
        return ServiceAccount(host, port, paths)
    raise ApiServerError(
        "there are no credentials for the API server: kubeconfig is not set, and this is not a pod"
    )


def _named(entries: Iterable[Mapping[str, Any]], name: str) -> Mapping[str, Any]:
    return {entry["name"]: entry for entry in entries}[name]


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, ValueError) as error:
        raise ApiServerError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _tls_context(authority: str) -> ssl.SSLContext:
    """Return a context that trusts this certificate authority, or the host's if it is empty."""
    try:
        return ssl.create_default_context(cadata=authority or None)
    except (ssl.SSLError, ValueError, TypeError) as error:
        raise ApiServerError(f"the certificate authority is invalid: {error}") from None


def _load_certificate(tls: ssl.SSLContext, certificate: str, key: str) -> None:
    """Load a client certificate; Python's ssl reads it from a file only, which is private and short-lived."""
    try:
        with tempfile.NamedTemporaryFile("w", suffix=".pem") as file:
            file.write(f"{certificate}\n{key}")
            file.flush()
            tls.load_cert_chain(file.name)
    except (OSError, ValueError) as error:  # or ssl.SSLError
        raise ApiServerError(f"the client certificate is invalid: {error}") from None
