"""Whether the Hugging Face hub can be reached at all; its own clients try for minutes to find out."""

from __future__ import annotations

import errno
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

ATTEMPTS = 3
WAIT_SECONDS = 2.0
CONNECT_SECONDS = 5.0
# What a machine says that has no way to the hub's; others, such as a time-out, may pass.
_NO_NETWORK = (errno.ECONNREFUSED, errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN)


def why_unreachable(sleep: Callable[[float], None] = time.sleep) -> str:
    """Why no connection to the hub can be made, as its name is not known or the connection is refused; else "".

    Asked ``ATTEMPTS`` times, since names fail to resolve for moments too. Behind a proxy only the proxy could say.
    """
    from huggingface_hub import constants

    address = urlsplit(constants.ENDPOINT)
    host, port = address.hostname or "", address.port or (80 if address.scheme == "http" else 443)
    if not urllib.request.proxy_bypass(host) and urllib.request.getproxies().keys() & {address.scheme, "all"}:
        return ""
    reason = ""
    for attempt in range(ATTEMPTS):
        if attempt:
            sleep(WAIT_SECONDS)
        try:
            socket.create_connection((host, port), timeout=CONNECT_SECONDS).close()
        except OSError as error:
            if not isinstance(error, socket.gaierror) and error.errno not in _NO_NETWORK:
                return ""
            reason = f"{host}: {error.strerror}"
        else:
            return ""
    return reason


@contextmanager
def offline() -> Iterator[None]:
    """Within, hub datasets come from the cache or not at all, as with HF_HUB_OFFLINE=1."""
    import datasets
    from huggingface_hub import constants

    before = datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = before
