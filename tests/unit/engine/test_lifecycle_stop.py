"""After `stop` the engine refuses requests instead of keeping them for ever; `start` takes them again."""

import pytest

from deepinfer_core.engine.outputs import GenerationError


def test_a_stopped_engine_refuses_requests_until_it_is_started(make_engine):
    engine = make_engine()
    engine.start()
    engine.stop()
    with pytest.raises(GenerationError, match="the engine has stopped"):
        engine.submit([1, 2, 3])
    engine.start()
    try:
        assert engine.submit([1, 2, 3]).result(10) is not None
    finally:
        engine.stop()
