"""bookkit/stacks/meshscope_mutants.py finds code, runs the right tests, and does not pass what it should not.

The faults themselves are planted with `make mutants-meshscope`; here a few lines stand for meshscope.
"""

import math
import types

import pytest

from bookkit.model.book import Problem
from bookkit.stacks import meshscope_mutants as mutants
from bookkit.stacks.mutant_worker import function_code, functions_of

SOURCE = '''\
import functools


def first(x,
          y=1):
    if (x
            > y):
        return x
    return [x
            for _ in range(y)]


class Thing:
    """A thing."""

    @property
    def size(self):
        return 2 + 2

    @functools.cached_property
    def slow(self):
        return 3

    @classmethod
    def made(cls):
        return cls()
'''


@pytest.fixture
def module(tmp_path):
    (tmp_path / "_toy.py").write_text(SOURCE)
    return mutants.Module(tmp_path / "_toy.py")


def fault(module, function, line, old, new):
    """A fault as text, which needs no mutmut."""
    made = mutants.Mutant(module, function, line, "", (None, None, None))
    made.__dict__["source"] = SOURCE.replace(old, new)
    return made


def test_statements_and_functions_are_found(module):
    assert list(module.functions) == ["first", "Thing.size", "Thing.slow", "Thing.made"]
    assert module.statement(7) == range(6, 8), "the head of the if"
    assert module.statement(8) == range(8, 9)
    assert module.statement(10) == range(9, 11), "every line of a return"


def test_code_that_differs_in_place_alone_is_no_fault(module):
    assert fault(module, "first", 7, "> y", ">= y").changes_code()
    assert not fault(module, "first", 7, "> y", ">  y").changes_code()
    assert not fault(module, "first", 5, "y=1", "y=2").changes_code(), "evaluated outside"
    assert not fault(module, "Thing.size", 17, "2 + 2", "4").changes_code()


def test_a_fault_is_called_by_what_becomes_of_its_line(module):
    changed = fault(module, "Thing.slow", 21, "return 3", "return 4")
    assert changed.key == ("_toy.Thing.slow", "return 3", "return 4")


def test_code_is_exchanged_in_functions_properties_and_methods():
    space = types.ModuleType("toy")
    exec(SOURCE, vars(space))
    live = functions_of(space, "toy")
    assert set(live) == {"first", "Thing.size", "Thing.slow", "Thing.made"}
    thing = space.Thing()
    assert thing.size == 4
    live["Thing.size"].__code__ = function_code(
        compile(SOURCE.replace("2 + 2", "2 * 3"), "", "exec"), "Thing.size"
    )
    assert thing.size == 6


ENTRY = '[[survivor]]\nfunction = "_toy.first"\nline = "return x"\nbecomes = "return y"\nreason = "why"\n'


@pytest.mark.parametrize(
    "text, says",
    [
        (ENTRY, ""),
        (ENTRY.replace('reason = "why"', 'reason = ""'), "says nothing about reason"),
        (ENTRY.replace("_toy.first", "_toy.second"), "has no line 'return x' any more"),
        (ENTRY.replace('"return x"', '"return z"'), "has no line 'return z' any more"),
        (ENTRY.replace("_toy.first", "_toy.Thing.slow"), "has no line 'return x' any more"),
    ],
)
def test_the_list_fits_the_code(module, tmp_path, text, says):
    (tmp_path / mutants.SURVIVORS).parent.mkdir(parents=True)
    (tmp_path / mutants.SURVIVORS).write_text(text)
    if says:
        with pytest.raises(Problem, match=says):
            mutants.survivors(tmp_path, [module])
    else:
        assert list(mutants.survivors(tmp_path, [module]).values()) == ["why"]


def test_one_reason_holds_for_a_part_wherever_it_stands(module, tmp_path):
    (tmp_path / mutants.SURVIVORS).parent.mkdir(parents=True)
    text = '[[survivor]]\npart = "return "\nbecomes = ["yield ", ""]\nreason = "why"\n'
    (tmp_path / mutants.SURVIVORS).write_text(text + 'function = "_toy.Thing.slow"\n')
    one = {("_toy.Thing.slow", "return 3", new): "why" for new in ("yield 3", "3")}
    assert mutants.survivors(tmp_path, [module]) == one
    (tmp_path / mutants.SURVIVORS).write_text(text)
    listed = mutants.survivors(tmp_path, [module])
    assert one.items() <= listed.items()
    assert ("_toy.first", "return x", "yield x") in listed
    (tmp_path / mutants.SURVIVORS).write_text(text.replace('"return "', '"gone"'))
    with pytest.raises(Problem, match="has no line with 'gone' any more"):
        mutants.survivors(tmp_path, [module])


def tried(module, notices, listed, number=10, end=math.inf):
    """What is to be mended after faults of which a trial notices some."""
    faults = [fault(module, "Thing.slow", 21, "return 3", f"return {n + 4}") for n in range(number)]
    trial = types.SimpleNamespace(
        noticed=lambda mutant: "a test" if notices(int(mutant.key[2][-1]) - 4) else None
    )
    listed = {("_toy.Thing.slow", "return 3", f"return {n + 4}"): "why" for n in listed}
    return mutants.try_all(trial, faults, listed, end)


def test_survivors_are_listed_and_few(module, capsys):
    assert tried(module, lambda n: n > 0, [0], number=6)[0].startswith("83.3% are noticed, not 90%")
    capsys.readouterr()
    assert not tried(module, lambda n: True, [], number=6)
    assert "_toy                 6        0\n6 of 6 noticed: 100.0%" in capsys.readouterr().out
    (unlisted, _) = tried(module, lambda n: n > 0, [], number=6)
    assert "'return 4') is not noticed: write a test, or a reason" in unlisted
    (found,) = tried(module, lambda n: True, [0], number=6)
    assert "is noticed by a test: remove it" in found


def test_nothing_tried_is_no_success(module):
    assert tried(module, lambda n: True, [], end=0)
