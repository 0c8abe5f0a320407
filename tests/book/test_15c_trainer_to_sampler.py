"""The page "From a trainer to a sampler": weights from one mesh to another, and what is held meanwhile."""

from functools import partial
from unittest import mock

import jax
import numpy as np
from compilations import compilations

import meshscope as ms
from fetched import fetched_by

PAGE = "15c-trainer-to-sampler"
P = jax.P


def held(device):
    """The bytes that arrays of this process hold on a device, each buffer once."""
    shards = (
        shard.data
        for array in jax.live_arrays()
        for shard in array.addressable_shards
        if shard.device == device
    )
    return sum({shard.unsafe_buffer_pointer(): shard.nbytes for shard in shards}.values())


def test_the_meshes_share_no_device(page):
    """The first four devices train, the last four generate."""
    assert page.trainer.devices.flatten().tolist() == jax.devices()[:4]
    assert page.sampler.devices.flatten().tolist() == jax.devices()[4:]


def test_the_trainer_has_quarters_and_the_sampler_halves(page):
    """Of each matrix; both have all of each norm."""
    for path, weight in page.trained.items():
        parts = (1, 1) if "norm" in path else (4, 2)
        for array, part in zip((weight, page.sent[path]), parts, strict=True):
            assert array.addressable_shards[0].data.size * part == weight.size, path
    trainer, sampler = (ms.memory(tree).bytes_per_device for tree in (page.trained, page.sent))
    assert 1.95 < sampler / trainer < 2


def test_the_sampler_has_the_same_weights_on_its_four_devices(page):
    """Bit for bit."""
    for path, weight in page.trained.items():
        sent = page.sent[path]
        assert sent.sharding.mesh == page.sampler and "data" not in sent.sharding.spec
        np.testing.assert_array_equal(sent, weight)


def test_device_put_fetches_an_array_whose_shards_differ_and_send_does_not(page):
    """Alone, device_put takes the whole matrix through the host; once regrouped, nothing goes there."""
    for path in ("blocks/query/kernel", "blocks/out/kernel", "embed/embedding"):
        weight = page.trained[path]
        target = page.sent[path].sharding
        assert fetched_by(partial(jax.device_put, weight, target)) == [weight.shape]
        assert fetched_by(partial(page.send, weight, page.sampler)) == []


def test_each_shard_that_the_sampler_needs_is_a_shard_of_the_regrouped_weight(page):
    """And for a matrix, none is one of the trained weight."""
    for path, weight in page.trained.items():
        wanted = set(map(str, page.sent[path].sharding.devices_indices_map(weight.shape).values()))
        for array, there in [(page.regrouped[path], True), (weight, "norm" in path)]:
            has = set(map(str, array.sharding.devices_indices_map(weight.shape).values()))
            assert (wanted <= has) == there, path


def test_for_another_shape_regroup_to_it_on_the_devices_of_the_trainer(page):
    """Quarters along `model`: from halves they would go through the host, from quarters not."""
    here, there = (
        jax.make_mesh((1, 4), ("data", "model"), axis_types=page.auto, devices=devices)
        for devices in (jax.devices()[:4], jax.devices()[4:])
    )
    spec = page.sent["blocks/query/kernel"].sharding.spec
    target = jax.NamedSharding(there, spec)
    halves = page.regrouped["blocks/query/kernel"]
    quarters = jax.jit(page.identity, out_shardings=jax.NamedSharding(here, spec))(page.query)
    assert fetched_by(lambda: jax.device_put(halves, target)) == [halves.shape]
    assert fetched_by(lambda: jax.device_put(quarters, target)) == []
    np.testing.assert_array_equal(jax.device_put(quarters, target), page.query)


def test_regrouping_gathers_along_data_and_nothing_else(page):
    """One all_gather for a matrix, on the trainer's own devices."""
    with compilations() as compiled:
        regrouped = page.regroup(page.query)
    (program,) = compiled
    rows = ms.collectives(program, page.trainer)
    assert [(row.kind, row.axes) for row in rows] == [("all-gather", ("data",))]
    assert regrouped.sharding.device_set == set(page.trainer.devices.flat)


def test_the_next_update_compiles_nothing(page):
    """As often as one likes: identity is one function; a lambda would be a new one each time."""
    seen, compiled = [], "/jax/core/compile/backend_compile_duration"

    def note(name, *_, **__):
        seen.append(name)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        for weight in page.trained.values():
            page.send(weight, page.sampler)
        assert compiled not in seen
        jax.jit(lambda x: x, out_shardings=page.sent["embed/embedding"].sharding)(
            page.sent["embed/embedding"]
        )
        assert compiled in seen
    finally:
        jax.monitoring.unregister_event_duration_listener(note)  # this one, and no one else's


def test_one_regrouped_weight_exists_at_a_time(page):
    """When each copy begins, the trainer's devices hold this one more weight, and afterwards none."""
    device, put, extra = jax.devices()[0], jax.device_put, []
    before = held(device)

    def noted(array, sharding):
        extra.append(held(device) - before)
        return put(array, sharding)

    with mock.patch.object(jax, "device_put", noted):
        for weight in page.trained.values():
            page.send(weight, page.sampler)
            assert held(device) == before
    alone = [ms.memory(page.regrouped[path]).bytes_per_device for path in page.trained]
    assert all(0 <= more <= size for more, size in zip(extra, alone, strict=True))
    assert max(extra) == max(alone) == ms.memory(page.largest).bytes_per_device


def test_gathering_needs_at_most_as_much_again_of_temporary_memory(page):
    """Of the programs compiled for CPU; some need none."""
    for path, weight in page.trained.items():
        with compilations() as compiled:
            page.regroup(weight)
        (program,) = compiled
        size = ms.memory(page.regrouped[path]).bytes_per_device
        assert program.memory_analysis().temp_size_in_bytes <= size


def test_each_copy_has_arrived_before_the_next_weight_is_regrouped(page):
    """device_put and then block_until_ready, of the same array, for each weight."""
    put, wait, calls = jax.device_put, jax.block_until_ready, []

    def noted(name, function):
        def call(*given):
            result = function(*given)
            calls.append((name, id(result)))
            return result

        return call

    with (
        mock.patch.object(jax, "device_put", noted("put", put)),
        mock.patch.object(jax, "block_until_ready", noted("wait", wait)),
    ):
        kept = [page.send(weight, page.sampler) for weight in page.trained.values()]
    assert calls == [(name, id(array)) for array in kept for name in ("put", "wait")]


def test_the_loop_replaces_one_weight_at_a_time_and_a_new_dict_does_not(page):
    """What a device of the sampler holds: one weight more; with a new dict, at the end all of them."""
    device = jax.devices()[4]
    sent = {path: page.send(weight, page.sampler) for path, weight in page.trained.items()}
    before = held(device)
    for path, weight in page.trained.items():
        new = page.send(weight, page.sampler)
        assert held(device) - before == ms.memory(new).bytes_per_device
        sent[path] = new
        del new
        assert held(device) == before
    again = {path: page.send(weight, page.sampler) for path, weight in page.trained.items()}
    assert held(device) - before == ms.memory(again).bytes_per_device


def test_a_device_of_both_meshes_holds_both_copies(page):
    """What it trains and what it generates with; also if the meshes share some devices only."""
    parts = [ms.memory(tree).bytes_per_device for tree in (page.trained, page.regrouped)]
    assert page.both == sum(parts) and parts[1] == ms.memory(page.sent).bytes_per_device
    assert all(w.sharding.mesh == page.trainer for w in page.regrouped.values())
    before = [held(device) for device in jax.devices()]
    partly = page.mesh_of(jax.devices()[2:6])
    sent = {path: page.send(weight, partly) for path, weight in page.trained.items()}
    more = [held(device) - old for device, old in zip(jax.devices(), before, strict=True)]
    assert more == [0, 0, *4 * [ms.memory(sent).bytes_per_device], 0, 0]
