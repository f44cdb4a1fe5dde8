import logging
import warnings

import pytest

from flame.quiet import KNOWN_RECORDS, quiet_third_party, silence_known_noise


def test_noise_is_silent_and_errors_pass(capsys, recwarn):
    loud = logging.getLogger("torchao.test")
    with quiet_third_party():
        warnings.warn("old", FutureWarning, stacklevel=1)
        loud.warning("Failed to load x.so")
        loud.error("broken driver")
    assert "Failed" not in capsys.readouterr().err
    assert not recwarn.list


def test_errors_reach_the_console(caplog):
    with quiet_third_party():
        logging.getLogger("torchao.test").error("broken driver")
    assert "broken driver" in caplog.text


def test_everything_is_as_before_afterwards(caplog):
    with pytest.raises(ImportError), quiet_third_party():
        raise ImportError("no such kernel")
    logging.getLogger("x").warning("heard again")
    assert "heard again" in caplog.text
    with pytest.warns(UserWarning, match="seen"):
        warnings.warn("seen", UserWarning, stacklevel=1)


@pytest.fixture
def no_filters():
    before = {name: logging.getLogger(name).filters[:] for name in KNOWN_RECORDS}
    for name in KNOWN_RECORDS:
        logging.getLogger(name).filters.clear()
    yield
    for name, filters in before.items():
        logging.getLogger(name).filters[:] = filters


def test_known_noise_goes_and_the_rest_stays(no_filters, caplog):
    with warnings.catch_warnings(record=True) as seen:
        silence_known_noise()
        silence_known_noise()
        warnings.warn("Triton is not supported on current platform, roll back to CPU.", UserWarning, stacklevel=1)
        warnings.warn("loss is not finite", UserWarning, stacklevel=1)
    logging.getLogger("torchao").warning("Failed to load a.so: no")
    logging.getLogger("torchao").error("Failed to load b.so: a real error")
    logging.getLogger("torchao").warning("out of range")
    assert [str(warning.message) for warning in seen] == ["loss is not finite"]
    assert "a.so" not in caplog.text and "b.so" in caplog.text and "out of range" in caplog.text
    assert len(logging.getLogger("torchao").filters) == 1
