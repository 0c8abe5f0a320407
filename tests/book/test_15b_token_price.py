"""The page "What a token costs": memory bandwidth, arithmetic and dollars."""

import pytest

PAGE = "15b-token-price"


def test_n_is_the_weights_of_llama_8b_without_the_embedding(page):
    """7.5 billion, from the published sizes."""
    D, F, L, H, K, C, V = 4096, 14336, 32, 32, 8, 128, 128_256
    count = L * (2 * D * H * C + 2 * D * K * C + 3 * D * F) + D * V
    assert round(count / 1e9, 1) == page.N / 1e9 == 7.5
    assert round((count + V * D) / 1e9, 2) == page.stored_bytes / 2e9 == 8.03
    assert page.token_bytes == 2 * L * K * C * 2


def test_attention_does_four_operations_for_each_byte_of_cache(page):
    """4 L H C for a token of the context: four query heads share each key-value head."""
    L, H, K, C, context = 32, 32, 8, 128, 1024
    scores, mixed = 2 * H * C * context, 2 * H * C * context  # a multiplication and an addition
    seconds = page.arithmetic_seconds(1, context) - page.arithmetic_seconds(1, 0)
    assert seconds * page.operations == pytest.approx(L * (scores + mixed))
    assert H // K * 2 / 2 == 4 == L * (scores + mixed) / (context * page.token_bytes)


def critical_rows(page, context):
    """The rows above which decode is compute-bound, or infinity."""
    no_row = page.reading_seconds(0, context)
    gain = page.arithmetic_seconds(1, context) - (page.reading_seconds(1, context) - no_row)
    return no_row / gain if gain > 0 else float("inf")


def test_without_a_context_decode_is_compute_bound_with_more_than_295_rows(page):
    """Where arithmetic takes as long as reading."""
    assert round(critical_rows(page, 0)) == 295 == round(page.operations / page.bandwidth)
    assert page.arithmetic_seconds(294, 0) < page.reading_seconds(294, 0)
    assert page.arithmetic_seconds(296, 0) > page.reading_seconds(296, 0)


def test_with_a_context_more_rows_are_needed_and_beyond_390_tokens_none_suffice(page):
    needed = [critical_rows(page, context) for context in (0, 128, 256, 380)]
    assert needed == sorted(needed) and needed[-1] < float("inf")
    assert critical_rows(page, 400) == float("inf")
    assert page.arithmetic_seconds(100_000, 400) < page.reading_seconds(100_000, 400)
    assert page.arithmetic_seconds(100_000, 380) > page.reading_seconds(100_000, 380)


def test_with_any_number_of_rows_and_more_context_reading_takes_longer(page):
    """From 391 tokens on: for few rows because of the weights, for many of the caches."""
    for context in (395, 1024, 8192, 65536):
        for rows in (1, 10, 100, 1000, 1_000_000):
            assert page.reading_seconds(rows, context) > page.arithmetic_seconds(rows, context)


def test_at_390_tokens_one_more_row_adds_as_much_reading_as_arithmetic(page):
    """15.4 µs and 15.3 µs."""
    assert f"{1e6 * page.compute:.1f} {1e6 * page.read:.1f}" == "15.4 15.3"


def test_an_h100_has_85_5_gb(page):
    """81,559 MiB, as nvidia-smi reports them."""
    assert f"{81_559 * 2**20 / 1e9:.1f} {81_559 / 2**10:.1f}" == "85.5 79.6"
    assert page.memory == 85.5e9 and f"{page.stored_bytes / 1e9:.0f}" == "16"


def test_a_step_that_reads_nearly_all_memory_takes_25_ms(page):
    """All of it would take 26: what does not fit another row is not read, nor the embedding."""
    assert f"{1e3 * page.memory / page.bandwidth:.1f}" == "25.5"
    rows, seconds, dollars = page.price(8192)
    assert rows == 64 and f"{1e3 * seconds:.0f} {100 * dollars:.0f}" == "25 22"
    weights, caches = 2 * page.N, rows * 8192 * page.token_bytes
    assert f"{weights / 1e9:.0f} {caches / 1e9:.0f} {caches / rows / 1e9:.2f}" == "15 69 1.07"
    assert seconds == pytest.approx((weights + caches) / page.bandwidth)


def test_as_many_rows_as_fit_beside_all_weights(page):
    """The weights and the caches of so many rows fit, and those of one more do not."""
    for context in (1024, 8192, 65536):
        rows, _, _ = page.price(context)
        needs = [2 * 8.03e9 + n * context * page.token_bytes for n in (rows, rows + 1)]
        assert needs[0] <= page.memory < needs[1]


def test_a_token_costs_in_proportion_to_its_context(page):
    """Half the context, twice the rows and the same time; eight times the context, eight times the price."""
    half, full = page.price(4096), page.price(8192)
    assert half[0] // full[0] == 2 and f"{1e3 * half[1]:.0f} {1e3 * full[1]:.0f}" == "25 25"
    dollars = [page.price(context)[2] for context in (1024, 8192, 65536)]
    assert dollars[1] / dollars[0] == pytest.approx(8, rel=0.1)
    assert dollars[2] / dollars[1] == pytest.approx(8, rel=0.1)
    short = page.price(400)
    assert page.price(800)[2] / short[2] == pytest.approx(2, rel=0.01)
    assert page.arithmetic_seconds(short[0], 400) < short[1]
    assert page.price(8192, dollars_per_hour=4.0)[2] == pytest.approx(2 * dollars[1])


def test_the_figure_has_the_times_of_its_caption(page):
    """Rows and context, then milliseconds of arithmetic and of reading."""
    for rows, context, told in [
        (295, 0, "4.5 4.5"),
        (295, 1024, "4.6 16.3"),
        (64, 8192, "1.2 25.0"),
    ]:
        times = page.arithmetic_seconds(rows, context), page.reading_seconds(rows, context)
        assert " ".join(f"{1e3 * seconds:.1f}" for seconds in times) == told
