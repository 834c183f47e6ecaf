"""The URL of a cluster's dashboard: what may be told of it, and what may be sent there."""

from __future__ import annotations

import ipaddress
import os
import socket
from urllib.parse import SplitResult, unquote, urlsplit

from cluster.workers.outcomes import one_line
from pretrain.common.errors import InputError, MachineError

ANSWER_SECONDS = 3.0


def without_password(address: str) -> str:
    """An address for messages: user and password in it become `***`. It need not be a proper URL."""
    before, at, host = address.rpartition("@")
    scheme = before.partition("//")[0] + "//" if "//" in before else ""
    return f"{scheme}***@{host}" if at else address


def redacted(error: BaseException, address: str) -> str:
    """An exception on one line, without the password of the address that it is about."""
    text = one_line(error).replace(address, without_password(address))
    userinfo = address.rpartition("@")[0].rpartition("//")[2]
    password = userinfo.partition(":")[2]
    for part in sorted({userinfo, password, unquote(password)}, key=len, reverse=True):
        text = text.replace(part, "***") if part else text
    return text


def check_dashboard(address: str, *, plain_http: bool = False) -> None:
    """Make sure that `address` is the URL of a dashboard that answers, and that no secret goes there for all to read.

    The token is a secret, where this process has one, and so are user and password in the URL: services take a token for
    either. `plain_http` sends them over http to other machines too.

    Raises:
        InputError: it is no URL, or a secret would leave this machine unencrypted; nothing was sent yet.
        MachineError: nothing answers there.
    """
    parts = _parts(address)
    if parts.scheme == "http" and not plain_http and (parts.username or parts.password or _has_token()):
        _check_local(address, str(parts.hostname))
    import requests

    try:  # Ray's own client would wait for an answer for ever
        requests.get(f"{address.rstrip('/')}/api/version", timeout=ANSWER_SECONDS)
    except (requests.RequestException, ValueError) as error:
        raise MachineError(
            f"No cluster answers at {without_password(address)} ({redacted(error, address)}). Check --address, and that this "
            "machine is let in."
        ) from None


def answers_without_token(address: str) -> bool:
    """Whether the cluster lists its jobs for whoever asks, and so would run theirs."""
    import requests

    try:
        with requests.get(
            f"{address.rstrip('/')}/api/jobs/", timeout=ANSWER_SECONDS, stream=True, allow_redirects=False
        ) as answer:
            return answer.status_code == requests.codes.ok
    except requests.RequestException:
        return False


def _parts(address: str) -> SplitResult:
    try:
        parts = urlsplit(address)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return parts
    except ValueError:  # no IPv6 address, or no port
        pass
    shown = without_password(address)
    raise InputError(f"--address: {shown!r} is no URL of a Ray dashboard, such as http://127.0.0.1:8265.")


def _has_token() -> bool:
    """Whether Ray will send a token, by what `choose_token` or the user has set."""
    return os.environ.get("RAY_AUTH_MODE", "disabled") != "disabled"


def _check_local(address: str, host: str) -> None:
    """Refuse a machine other than this one (`InputError`)."""
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError) as error:
        raise MachineError(
            f"{without_password(address)}: {host} is not known here ({one_line(error)}). Check --address."
        ) from None
    if not all(ipaddress.ip_address(one.partition("%")[0]).is_loopback for one in found):
        raise InputError(
            f"{without_password(address)}: over http the token, or the password, would leave this machine unencrypted, and "
            "whoever reads it may run code on the cluster. Use https, or a tunnel (ssh -L 8265:127.0.0.1:8265 HEAD, then "
            "--address http://127.0.0.1:8265), or allow it with --allow-plain-http."
        )
