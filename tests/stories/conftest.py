"""Checkpoints whose config is edited, for tests of its fields."""

import functools

import pytest
import transformers

from tests.support.edited_config import Edited


@pytest.fixture(scope="module")
def quiet():
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    yield
    transformers.logging.set_verbosity_warning()
    transformers.utils.logging.enable_progress_bar()


@pytest.fixture(scope="module")
def edited(quiet, tmp_path_factory):
    """Returns a function: name of a family -> its checkpoint, to be edited."""
    make = lambda name: Edited(tmp_path_factory.mktemp("config") / name, name)  # noqa: E731
    return functools.cache(make)
