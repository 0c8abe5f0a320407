"""Rows of examples/dataset.py: none lost, none twice, whatever the number of processes."""

import itertools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dataset
import strategies
from endings import Failed
from strategies import Refused

P = jax.P
TEXT = dataset.Path(dataset.__file__).parent / "data" / "book.txt"


def numbered(path, rows, S, more=1):
    """A token file whose row r is r, r, …"""
    np.save(path, np.repeat(np.arange(rows + 1), S)[: rows * S + more].astype("uint16"))


# ---- what is read ------------------------------------------------------------------------------


def test_the_text_is_small_readable_and_under_its_licence():
    text = TEXT.read_bytes()
    assert 200_000 < len(text) <= 300_000
    assert text.decode().startswith("# Many devices, one program\n")
    assert "```" not in text.decode() and "https://" not in text.decode()


def test_rows_of_a_text_are_its_bytes_and_none_is_lost(tmp_path):
    text = bytes(np.random.default_rng(0).integers(256, size=1000, dtype="uint8"))
    (tmp_path / "a.txt").write_bytes(text)
    training, test, said = dataset.open_tokens(str(tmp_path / "a.txt"), 9, 256)
    rows = [
        *(training[row] for row in range(len(training))),
        *(test[row] for row in range(len(test))),
    ]
    assert len(rows) == 111 and len(test) == 6 and said == "a.txt of 1000 tokens"
    for number, row in enumerate(rows):
        assert bytes(row.astype("uint8")) == text[9 * number : 9 * number + 10]


def test_shards_of_a_folder_are_one_data_set(tmp_path):
    for name, rows in [("b.npy", 40), ("a.npy", 20), ("ignored.csv", 0), ("tiny.npy", 0)]:
        numbered(tmp_path / name, rows, 8) if rows else (tmp_path / name).write_text("")
    np.save(tmp_path / "tiny.npy", np.zeros(3, "uint16"))  # less than a row
    training, test, _ = dataset.open_tokens(str(tmp_path), 8, 100)
    assert (len(training), len(test)) == (19 + 38, 1 + 2)
    assert [training[row][0] for row in range(57)] == [*range(19), *range(38)]
    assert [test[row][0] for row in range(3)] == [19, 38, 39]


@pytest.mark.parametrize("what, says", [
    ("nothing", "does not exist"), ("an empty folder", "no file that can be read"),
    ("too little", "fewer than two rows of --S 64"), ("a matrix", "has 2 dimensions of int64"),
    ("floats", "1 dimensions of float64"), ("no array", "cannot be read"),
])  # fmt: skip
def test_data_that_cannot_be_used_is_refused_in_a_sentence(tmp_path, what, says):
    path = tmp_path / "a.npy"
    if what == "an empty folder":
        path = tmp_path
    elif what == "too little":
        path = tmp_path / "a.txt"
        path.write_text("x" * 128)
    elif what == "no array":
        path.write_text("no array")
    elif what != "nothing":
        np.save(path, np.zeros((9, 9), "int64") if what == "a matrix" else np.zeros(999))
    with pytest.raises(Refused) as refusal:
        dataset.open_tokens(str(path), 64, 256)
    assert says in str(refusal.value) and str(path) in str(refusal.value)


def test_a_token_beyond_the_vocabulary_is_named_and_bytes_need_256(tmp_path):
    np.save(tmp_path / "a.npy", np.full(100, 300, "uint16"))
    training, _, _ = dataset.open_tokens(str(tmp_path), 8, 256)
    with pytest.raises(Failed, match=r"a\.npy has the token 300 in row 3, and --V is 256"):
        training[3]
    with pytest.raises(Refused, match="use --V 256"):
        dataset.open_tokens(str(TEXT), 8, 100)


# ---- in which order, and by whom ---------------------------------------------------------------


class Numbers:
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, number):
        return np.array([int(number)], "int32")


@given(count=st.integers(1, 60), seed=st.integers(0, 5))
@settings(deadline=None, max_examples=15)
def test_each_row_once_an_epoch(count, seed):
    order = dataset.shuffled(Numbers(count), seed)
    for epoch in range(3):
        seen = [int(order[number][0]) for number in range(epoch * count, (epoch + 1) * count)]
        assert sorted(seen) == list(range(count))


def test_epochs_and_seeds_shuffle_differently():
    def rows(seed, epoch):
        order = dataset.shuffled(Numbers(50), seed)
        return tuple(int(order[50 * epoch + number][0]) for number in range(50))

    assert len({rows(seed, epoch) for seed in (0, 1, 2) for epoch in (0, 1, 2)}) == 9


class Process:
    """Some devices of a sharding, as one of several processes has them."""

    def __init__(self, sharding, devices):
        self.sharding, self.devices = sharding, devices

    def addressable_devices_indices_map(self, shape):
        held = self.sharding.devices_indices_map(shape)
        return {device: held[device] for device in self.devices}


def mesh_of(name, **asked):
    return strategies.make_mesh(name, asked, lambda *_: [], jax.devices())


@pytest.mark.parametrize("processes", [1, 2, 4, 8])
@pytest.mark.parametrize("name, asked", [("fsdp", {}), ("hsdp", {}), ("fsdp-tensor", {}),
    ("tensor", {"model": 8})])  # fmt: skip
def test_each_process_reads_what_its_devices_hold(name, asked, processes):
    mesh = mesh_of(name, **asked)
    sharding = jax.NamedSharding(mesh, P(strategies.ROWS))
    held = sharding.devices_indices_map((16,))
    read = []
    for devices in np.split(np.array(jax.devices()), processes):
        rows = dataset.rows_here(Process(sharding, devices), 16)
        assert set(rows) == {row for device in devices for row in np.arange(16)[held[device]]}
        assert list(rows) == sorted(set(rows))
        read.append(len(rows))
    copies = max(processes // (mesh.shape["data"] * mesh.shape["fsdp"]), 1)
    assert sum(read) == 16 * copies


@given(
    count=st.integers(20, 50),
    stops=st.lists(st.tuples(st.integers(0, 4), st.sampled_from([1, 2, 4])), max_size=4),
)
@settings(deadline=None, max_examples=15)
def test_no_row_is_lost_or_seen_twice_when_the_number_of_processes_changes(count, stops):
    """Some steps with so many processes, then the next from the position that was saved."""
    order, position, size, seen = dataset.shuffled(Numbers(count), 3), 0, 8, []
    for taken, processes in [*stops, (2 * count // size, 2)]:
        parts = [
            dataset.Share(order, here, size, position)
            for here in np.split(np.arange(size), processes)
        ]
        for step in range(taken):
            for part in parts:
                n = len(part.here)
                seen += [int(part[step * n + number][0]) for number in range(n)]
        position += taken * size
    assert len(seen) == position
    for epoch in range(position // count):
        assert sorted(seen[epoch * count : (epoch + 1) * count]) == list(range(count))


def test_batches_go_on_from_a_position_with_the_same_rows():
    training, _, _ = dataset.open_tokens(str(TEXT), 16, 256)
    order, mesh = dataset.shuffled(training, 0), mesh_of("hsdp")
    whole = list(itertools.islice(dataset.batches(order, 16, mesh, 0), 5))
    assert [position for _, position in whole] == [16, 32, 48, 64, 80]
    rest = list(itertools.islice(dataset.batches(order, 16, mesh, whole[2][1]), 2))
    for (one, here), (other, there) in zip(whole[3:], rest, strict=True):
        assert here == there and np.array_equal(one, other)
        assert one.sharding.shard_shape(one.shape) == (2, 17)
    expected = np.stack([order[number] for number in range(16)])
    assert np.array_equal(whole[0][0], expected)
