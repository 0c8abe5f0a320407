"""Machines that examples are tried on: on the oldest releases, the small ones only every night."""

import pytest

DEVICES = [*(pytest.param(count, marks=pytest.mark.newest) for count in (1, 2)), 8]
