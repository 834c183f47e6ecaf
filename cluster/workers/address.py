"""Checks of the URL of a cluster's dashboard, and messages about it without credentials."""

import ipaddress
import os
import socket
from urllib.parse import SplitResult, unquote, urlsplit

from cluster.workers.outcomes import one_line
from pretrain.common.errors import InputError, MachineError

_TIMEOUT_SECONDS = 3.0  # time limit for the dashboard's response


def redact_credentials(address: str) -> str:
    """Replace user and password in an address, not necessarily a valid URL, with `***`."""
    prefix, at, host = address.rpartition("@")
    scheme = prefix.partition("//")[0] + "//" if "//" in prefix else ""
    return f"{scheme}***@{host}" if at else address


def redact_error(error: BaseException, address: str) -> str:
    """Return an exception on one line, without the credentials of `address`."""
    text = one_line(error).replace(address, redact_credentials(address))
    userinfo = address.rpartition("@")[0].rpartition("//")[2]
    password = userinfo.partition(":")[2]
    for secret in sorted({userinfo, password, unquote(password)}, key=len, reverse=True):
        text = text.replace(secret, "***") if secret else text
    return text


def check_dashboard(address: str, *, plain_http: bool = False) -> None:
    """Check that `address` is the URL of a dashboard that responds, and that no secret leaves this machine unencrypted.

    Secrets are this process's token, if it has one, and the user and password in the URL, which some services accept
    instead of a token. If the dashboard is on this machine, later requests of this process to it bypass any proxy.

    Args:
        plain_http: whether secrets may be sent to other machines over http, unencrypted.

    Raises:
        InputError: `address` is not a URL, or a secret would leave this machine unencrypted; nothing was sent yet.
        MachineError: no server responds there.
    """
    parts = _split_url(address)
    is_local = _is_local(str(parts.hostname))
    has_token = os.environ.get("RAY_AUTH_MODE", "disabled") != "disabled"  # set by `set_token_variables` or the user
    if parts.scheme == "http" and not plain_http and (parts.username or parts.password or has_token):
        _reject_plain_http(redact_credentials(address), is_local)
    if is_local:
        _bypass_proxy(address, str(parts.hostname))
    import requests

    try:  # Ray's own client would wait for a response forever
        requests.get(f"{address.rstrip('/')}/api/version", timeout=_TIMEOUT_SECONDS)
    except (requests.RequestException, ValueError) as error:
        raise MachineError(
            f"No cluster answers at {redact_credentials(address)} ({redact_error(error, address)}). Check --address, "
            "and that this machine has access."
        ) from None


def answers_without_token(address: str) -> bool:
    """Return whether the cluster lists its jobs without a token, which means that it runs anyone's jobs."""
    import requests

    try:
        with requests.get(
            f"{address.rstrip('/')}/api/jobs/", timeout=_TIMEOUT_SECONDS, stream=True, allow_redirects=False
        ) as response:
            return response.status_code == requests.codes.ok
    except requests.RequestException:
        return False


def _split_url(address: str) -> SplitResult:
    try:
        parts = urlsplit(address)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return parts
    except ValueError:  # an invalid IPv6 address or port
        pass
    redacted = redact_credentials(address)
    raise InputError(f"--address: {redacted!r} is not the URL of a Ray dashboard, such as http://127.0.0.1:8265.")


def token_rejected_error(where: str) -> InputError:
    """Return the error for a cluster at `where` that rejects this process's token."""
    advice = "Unset RAY_AUTH_TOKEN, which overrides files, and put" if "RAY_AUTH_TOKEN" in os.environ else "Put"
    return InputError(
        f"{where}: the cluster rejects this token. {advice} the cluster's token into RAY_AUTH_TOKEN_PATH "
        "(a file of mode 0600) or ~/.ray/auth_token."
    )


def _is_local(host: str) -> bool | None:
    """Return whether all addresses of `host` are loopback addresses; None if it cannot be resolved."""
    try:
        addresses = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):
        return None
    return all(ipaddress.ip_address(text.partition("%")[0]).is_loopback for text in addresses)


def _reject_plain_http(url: str, is_local: bool | None) -> None:
    """Raise `InputError` for a dashboard on another machine, `MachineError` if its name cannot be resolved."""
    if is_local is None:
        raise MachineError(f"{url}: this machine cannot resolve the name. Check --address.")
    if not is_local:
        raise InputError(
            f"{url}: over http the token, or the password, would leave this machine unencrypted, "
            "and anyone who reads it can run code on the cluster. Use https, or a tunnel "
            "(ssh -L 8265:127.0.0.1:8265 HEAD, then "
            "--address http://127.0.0.1:8265), or allow it with --allow-plain-http."
        )


def _bypass_proxy(address: str, host: str) -> None:
    """Add `host` to `no_proxy`: a proxy would see the token, and connect to its machine's loopback address."""
    from requests.utils import should_bypass_proxies

    if not should_bypass_proxies(address, no_proxy=None):
        hosts = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
        os.environ["no_proxy"] = f"{hosts},{host}" if hosts else host
