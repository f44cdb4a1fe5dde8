"""Whether the hub can be reached, found out in seconds."""

from __future__ import annotations

import errno
import socket

import datasets
import pytest
from huggingface_hub import constants

from flame.data import hub
from flame.data.loading import load_rows
from flame.data.sources import SourceSpec
from flame.errors import UserError

UNKNOWN = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
REFUSED = ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")


@pytest.fixture
def answers(monkeypatch):
    """What connecting answers, time after time: an error, or None where it succeeds."""
    given: list[OSError | None] = []

    def connect(address, timeout):
        answer = given.pop(0)
        if answer is not None:
            raise answer
        return socket.socket()

    monkeypatch.setattr(hub.socket, "create_connection", connect)
    monkeypatch.setattr(hub.urllib.request, "getproxies", dict)
    monkeypatch.setattr(constants, "ENDPOINT", "https://hub.test")
    return given


@pytest.mark.parametrize(
    ("given", "reason", "num_waits"),
    [
        ([None], "", 0),
        ([UNKNOWN] * 3, "hub.test: Name or service not known", 2),
        ([REFUSED] * 3, "hub.test: Connection refused", 2),
        ([UNKNOWN, None], "", 1),
        ([TimeoutError("timed out")], "", 0),
    ],
)
def test_no_network_is_what_stays_unknown_or_refused(answers, given, reason, num_waits):
    answers += given
    waits: list[float] = []
    assert hub.why_unreachable(waits.append) == reason
    assert len(waits) == num_waits and not answers


def test_a_proxy_is_not_asked(answers, monkeypatch):
    monkeypatch.setattr(hub.urllib.request, "getproxies", lambda: {"https": "http://proxy.test:3128"})
    assert hub.why_unreachable() == ""


def test_without_network_a_hub_dataset_is_refused_at_once(monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "why_unreachable", lambda: "hub.test: Name or service not known")
    monkeypatch.setattr("flame.data.loading.time.sleep", lambda seconds: pytest.fail("waited for a network"))
    with pytest.raises(UserError, match=r"some/dataset: the Hugging Face hub cannot be reached \(hub.test: Name or"):
        load_rows(SourceSpec("some/dataset"))
    assert not datasets.config.HF_HUB_OFFLINE and not constants.HF_HUB_OFFLINE
