"""The URL of a cluster's dashboard: what messages may show of it, and which secrets may be sent there."""

from __future__ import annotations

import ipaddress
import os
import socket
from urllib.parse import SplitResult, unquote, urlsplit

from cluster.workers.outcomes import one_line
from pretrain.common.errors import InputError, MachineError

ANSWER_SECONDS = 3.0


def without_password(address: str) -> str:
    """An address for messages: user and password in it become `***`. It need not be a valid URL."""
    before, at, host = address.rpartition("@")
    scheme = before.partition("//")[0] + "//" if "//" in before else ""
    return f"{scheme}***@{host}" if at else address


def redacted(error: BaseException, address: str) -> str:
    """An exception on one line, without the password of `address`."""
    text = one_line(error).replace(address, without_password(address))
    userinfo = address.rpartition("@")[0].rpartition("//")[2]
    password = userinfo.partition(":")[2]
    for part in sorted({userinfo, password, unquote(password)}, key=len, reverse=True):
        text = text.replace(part, "***") if part else text
    return text


def check_dashboard(address: str, *, plain_http: bool = False) -> None:
    """Check that `address` is the URL of a dashboard that answers, and that no secret leaves this machine unencrypted.

    Secrets are this process's token, if it has one, and user and password in the URL: services accept either as a
    token.

    Args:
        plain_http: send secrets over http to other machines, too.

    Raises:
        InputError: it is not a URL, or a secret would leave this machine unencrypted; nothing was sent yet.
        MachineError: nothing answers there.
    """
    parts = _parts(address)
    if parts.scheme == "http" and not plain_http and (parts.username or parts.password or _has_token()):
        _check_local(address, str(parts.hostname))
    import requests

    try:  # Ray's own client would wait for an answer forever
        requests.get(f"{address.rstrip('/')}/api/version", timeout=ANSWER_SECONDS)
    except (requests.RequestException, ValueError) as error:
        raise MachineError(
            f"No cluster answers at {without_password(address)} ({redacted(error, address)}). Check --address, "
            "and that this machine has access."
        ) from None


def answers_without_token(address: str) -> bool:
    """Whether the cluster lists its jobs without a token, and so would run anybody's job."""
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
    except ValueError:  # an invalid IPv6 address or port
        pass
    shown = without_password(address)
    raise InputError(f"--address: {shown!r} is not the URL of a Ray dashboard, such as http://127.0.0.1:8265.")


def _has_token() -> bool:
    """Whether Ray will send a token, according to what `choose_token` or the user has set."""
    return os.environ.get("RAY_AUTH_MODE", "disabled") != "disabled"


def _check_local(address: str, host: str) -> None:
    """Refuse a machine other than this one (`InputError`)."""
    try:
        addresses = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError) as error:
        raise MachineError(
            f"{without_password(address)}: cannot resolve {host} ({one_line(error)}). Check --address."
        ) from None
    if not all(ipaddress.ip_address(one.partition("%")[0]).is_loopback for one in addresses):
        raise InputError(
            f"{without_password(address)}: over http the token, or the password, would leave this machine unencrypted, "
            "and anyone who reads it can run code on the cluster. Use https, or a tunnel "
            "(ssh -L 8265:127.0.0.1:8265 HEAD, then "
            "--address http://127.0.0.1:8265), or allow it with --allow-plain-http."
        )
