"""The page "What a token costs": memory bandwidth, arithmetic and dollars."""

import pytest

PAGE = "15b-token-price"


def test_n_is_the_weights_of_llama_8b_without_the_embedding(page):
    """7.5 billion, from the published sizes; 4 L H C operations for a token of the context."""
    D, F, L, H, K, C, V = 4096, 14336, 32, 32, 8, 128, 128_256
    count = L * (2 * D * H * C + 2 * D * K * C + 3 * D * F) + D * V
    assert round(count / 1e9, 1) == page.N / 1e9 == 7.5
    assert round((count + V * D) / 1e9, 2) == page.STORED / 2e9 == 8.03
    assert page.token_bytes == 2 * L * K * C * 2 and (page.L, page.H, page.C) == (L, H, C)
    assert 4 * L * H * C == 4 * page.token_bytes  # four operations for each byte of cache


def critical_rows(page, chip, context):
    """The rows from which on decode is compute-bound, or infinity."""
    no_row = page.step_seconds(chip, 0, context)[1]
    arithmetic, memory = page.step_seconds(chip, 1, context)
    gain = arithmetic - (memory - no_row)  # of one more row
    return no_row / gain if gain > 0 else float("inf")


def test_without_a_context_decode_is_compute_bound_from_295_rows_and_166(page):
    """Where arithmetic takes as long as memory."""
    for chip, rows in [("H100", 295), ("TPU v5p", 166)]:
        assert round(critical_rows(page, chip, 0)) == rows
        below, above = (page.step_seconds(chip, n, 0) for n in (rows - 1, rows + 1))
        assert below[0] < below[1] and above[0] > above[1]


def test_with_a_context_more_rows_are_needed_and_beyond_390_tokens_none_suffice(page):
    needed = [critical_rows(page, "H100", context) for context in (0, 128, 256, 380)]
    assert needed == sorted(needed) and needed[-1] < float("inf")
    assert critical_rows(page, "H100", 400) == float("inf")
    arithmetic, memory = page.step_seconds("H100", 100_000, 400)
    assert arithmetic < memory
    arithmetic, memory = page.step_seconds("H100", 100_000, 380)
    assert arithmetic > memory


def test_an_h100_has_85_5_gb():
    """81,559 MiB, as nvidia-smi reports them; a TPU v5p 95 GiB."""
    assert f"{81_559 * 2**20 / 1e9:.1f} {81_559 / 2**10:.1f}" == "85.5 79.6"
    assert f"{95 * 2**30 / 1e9:.0f}" == "102"


def test_a_step_that_reads_nearly_all_memory_takes_25_ms(page):
    """All of it would take 26: what does not fit another row is not read, nor the embedding."""
    _, bandwidth, size = page.CHIPS["H100"]
    assert f"{1e3 * size / bandwidth:.1f}" == "25.5"
    rows, seconds, dollars = page.price("H100", 8192)
    assert rows == 64 and f"{1e3 * seconds:.0f} {100 * dollars:.0f}" == "25 22"
    weights, caches = 2 * page.N, rows * 8192 * page.token_bytes
    assert f"{weights / 1e9:.0f} {caches / 1e9:.0f} {caches / rows / 1e9:.2f}" == "15 69 1.07"
    assert seconds == pytest.approx((weights + caches) / bandwidth)


def test_as_many_rows_as_fit_beside_all_weights(page):
    """The weights and the caches of so many rows fit, and those of one more do not."""
    for chip, (_, _, size) in page.CHIPS.items():
        for context in (1024, 8192, 65536):
            rows, _, _ = page.price(chip, context)
            needs = [2 * 8.03e9 + n * context * page.token_bytes for n in (rows, rows + 1)]
            assert needs[0] <= size < needs[1]


def test_below_320_tokens_an_h100_full_of_rows_is_compute_bound(page):
    """With less context arithmetic decides, and the price hardly changes; with more, memory."""

    def bound_by_memory(context):
        rows, _, _ = page.price("H100", context)
        arithmetic, memory = page.step_seconds("H100", rows, context)
        return memory > arithmetic

    assert [bound_by_memory(context) for context in (64, 310, 330, 1024)] == [0, 0, 1, 1]
    dollars = [page.price("H100", context)[2] for context in (64, 256, 330, 660, 1320)]
    assert dollars[1] == pytest.approx(dollars[0], rel=0.05)
    assert dollars[3] / dollars[2] == pytest.approx(2, rel=0.02)
    assert dollars[4] / dollars[3] == pytest.approx(2, rel=0.02)


def test_a_token_costs_in_proportion_to_its_context(page):
    """Eight times the context, eight times the price, up to the rounding of rows."""
    dollars = [page.price("H100", context)[2] for context in (1024, 8192, 65536)]
    assert dollars[1] / dollars[0] == pytest.approx(8, rel=0.1)
    assert dollars[2] / dollars[1] == pytest.approx(8, rel=0.1)
    assert page.price("H100", 8192, dollars_per_hour=4.0)[2] == pytest.approx(2 * dollars[1])


def test_at_390_tokens_one_more_row_adds_as_much_reading_as_arithmetic(page):
    """15.2 billion operations in 15.4 µs, and 51 MB in 15.3 µs."""
    one, two = (page.step_seconds("H100", rows, 390) for rows in (1, 2))
    added = [f"{1e6 * (after - before):.1f}" for before, after in zip(one, two, strict=True)]
    assert added == ["15.4", "15.3"]
    operations = 2 * page.N + 4 * page.L * page.H * page.C * 390
    assert f"{operations / 1e9:.1f} {390 * page.token_bytes / 1e6:.0f}" == "15.2 51"


def test_with_any_number_of_rows_and_more_context_reading_takes_longer(page):
    """On an H100, from 391 tokens on: for few rows because of the weights, for many of the caches."""
    for context in (395, 1024, 8192):
        for rows in (1, 10, 100, 1000, 1_000_000):
            arithmetic, memory = page.step_seconds("H100", rows, context)
            assert memory > arithmetic
