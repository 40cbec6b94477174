"""The laws of memory settings and of the budget that several engines share."""

import gc
import threading

import pytest

from pagedcore.config.memory_budget import MemoryBudget, format_memory, parse_memory
from pagedcore.errors import InvalidConfig, MemoryBudgetExceeded


@pytest.mark.parametrize(
    ("given", "num_bytes"),
    [
        (None, None), (1, 1), (2**40, 2**40), ("123", 123), ("2GiB", 2**31), ("2 gib", 2**31), (" 1.5 KiB ", 1536),
        ("3MB", 3_000_000), ("1TB", 10**12), ("7B", 7), (0.25, 250), (0.9999, 999),
    ],
)  # fmt: skip
def test_memory_is_bytes_text_or_a_share(given, num_bytes):
    """Binary and decimal units, with or without spaces; a float below 1 is a share of free memory."""
    assert parse_memory(given, free_bytes=1000) == num_bytes


@pytest.mark.parametrize("given", ["9" * 5000, "9" * 400 + "GiB", "1e400GiB", "infB", "GiB", "1,5GiB", "0.1B", "1e3"])
def test_absurd_memory_is_refused(given):
    """Text that is no positive 63-bit number of bytes is refused, whatever its length."""
    with pytest.raises(InvalidConfig, match=r"kv_cache_memory: got (a string of|'[^']{1,8}', )"):
        parse_memory(given, free_bytes=1000)


@pytest.mark.parametrize("given", ["2G", "50%", "0x10", "1GiB1", "--1", "1 2 3 parsecs", b"1GiB", (1,), 1 + 0j])
def test_what_is_no_size_is_refused(given):
    """Units of other programs, percentages and other types are refused, never guessed at."""
    with pytest.raises(InvalidConfig, match=r"^kv_cache_memory: got (a |').* allowed is bytes or text"):
        parse_memory(given, free_bytes=1000)


def test_the_largest_and_the_smallest_size():
    """Sizes reach from one byte to 2**63 - 1, and a share of little memory may be nothing."""
    assert parse_memory(2**63 - 1, free_bytes=0) == 2**63 - 1
    assert parse_memory("1B", free_bytes=0) == 1
    assert parse_memory(5e-324, free_bytes=2**40) == 0


@pytest.mark.parametrize(("num_bytes", "text"), [
    (0, "0 bytes"), (1023, "1023 bytes"), (1024, "1.0 KiB"), (1536, "1.5 KiB"), (2**21, "2.0 MiB"),
    (5 * 2**30, "5.0 GiB"), (2**50, "1024.0 TiB"),
])
def test_bytes_are_said_with_a_binary_unit(num_bytes, text):
    """One decimal in the largest binary unit that is not above the number."""
    assert format_memory(num_bytes) == text


@pytest.mark.parametrize("total", [0, -1, 0.5, 1.0, True, None, "", "0", "half", [1]])
def test_a_budget_is_bytes_or_text(total):
    """A budget has a fixed size; a share of free memory is none."""
    with pytest.raises(InvalidConfig, match=r"^total: got "):
        MemoryBudget(total)


@pytest.mark.parametrize(("most", "num_bytes"), [(100, 100), ("1KiB", 1024), (0.25, 1024), ("9KiB", 9216)])
def test_a_share_is_bytes_text_or_a_part_of_the_total(most, num_bytes):
    """A float refers to the whole budget, not to what is left, so that the order of engines does not matter."""
    budget = MemoryBudget("4KiB")
    lease = budget.draw(100)
    assert budget.share(most).num_bytes == num_bytes
    lease.close()


@pytest.mark.parametrize("most", [None, 0, 1.0, "all", True])
def test_a_share_is_nothing_else(most):
    """Anything else is refused by name, when the share is made."""
    with pytest.raises(InvalidConfig, match=r"^share: got "):
        MemoryBudget(1000).share(most)


def test_what_is_drawn_is_whole_units_of_what_is_left():
    """As many units as fit into what is left, not more than asked for."""
    budget = MemoryBudget(1000)
    first = budget.draw(10, 300, unit=10)
    second = budget.draw(10, 10_000, unit=64)
    assert (first.num_bytes, second.num_bytes, budget.left_bytes) == (300, 640, 60)


def test_a_refusal_names_asked_left_and_total_and_takes_nothing():
    """The error has the three numbers, in its text too, and the budget is as before."""
    budget = MemoryBudget(1000)
    lease = budget.draw(900)
    with pytest.raises(MemoryBudgetExceeded, match="asked for 128 bytes, 100 of 1000 bytes are left") as refusal:
        budget.draw(128, 1280, unit=128)
    assert (refusal.value.asked, refusal.value.left, refusal.value.total) == (128, 100, 1000)
    assert (budget.left_bytes, lease.num_bytes) == (100, 900)


def test_bytes_go_back_once():
    """Closing twice, or closing and then losing the lease, gives back what was drawn and not more."""
    budget = MemoryBudget(1000)
    lease, other = budget.draw(600), budget.draw(300)
    lease.close()
    lease.close()
    del lease
    gc.collect()
    assert budget.left_bytes == 700
    del other
    gc.collect()
    assert budget.left_bytes == 1000 == budget.total_bytes


def test_threads_never_draw_more_than_there_is():
    """Whatever threads draw and give back at once, the leases that are out never exceed the total."""
    budget, out, most = MemoryBudget(100), [0], []
    watch = threading.Lock()

    def work(size):
        for _ in range(300):
            try:
                lease = budget.draw(1, size)
            except MemoryBudgetExceeded:
                continue
            with watch:
                out[0] += lease.num_bytes
                most.append(out[0])
                out[0] -= lease.num_bytes
                most.append(100 - budget.left_bytes)
            lease.close()

    threads = [threading.Thread(target=work, args=(size,)) for size in (30, 50, 70, 90)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) <= 100
    assert min(most) >= 0
    assert budget.left_bytes == 100
