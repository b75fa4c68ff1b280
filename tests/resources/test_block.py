"""What a block takes, and how many of them live on a multiprocessor."""

import pytest

from pallasfuse.resources.block import Buffer, Resources, Spill, most_registers, peak_bytes

H100 = 232448


def test_buffers_that_are_not_alive_together_share_memory():
    q, k, v = Buffer("q", 100, 0, 5), Buffer("k", 60, 1, 2), Buffer("v", 80, 3, 4)
    assert peak_bytes([q, k, v]) == 180
    assert peak_bytes([q, k, Buffer("v", 80, 2, 4)]) == 240
    assert peak_bytes([]) == 0
    assert peak_bytes([q, k, v], 100) == 200
    passing = [Buffer(n, 50, 1, 1, True) for n in "ab"]
    assert peak_bytes([q, *passing]) == q.bytes + 50


@pytest.mark.parametrize(("threads", "most"), [(128, 255), (256, 255), (384, 168), (512, 128), (1024, 64)])
def test_threads_share_the_registers(threads, most):
    assert most_registers(threads) == most


def test_a_block_that_does_not_fit_is_refused_by_its_widest_buffer():
    fits = Resources(H100, 128, 100)
    assert fits.problem(H100) is None
    too_large = Resources(H100 + 1, 128, 100, (), (Buffer("a", 1000), Buffer("3 of keys", 231449)))
    assert "3 of keys: 231449" in (too_large.problem(H100) or "")


@pytest.mark.parametrize(
    ("shared", "threads", "registers", "blocks"),
    [
        (H100, 128, 32, 1),  # all of shared memory
        (H100 + 1, 128, 32, 0),
        (100_000, 128, 32, 2),
        (0, 256, 255, 1),  # all registers
        (0, 256, 65, 3),  # 72 are given
        (0, 512, 32, 4),  # all threads
        (0, 32, 16, 32),
    ],
)
def test_how_many_blocks_live_on_a_multiprocessor(shared, threads, registers, blocks):
    assert Resources(shared, threads, registers).resident_blocks(H100) == blocks


def test_blocks_for_which_there_are_registers_by_what_threads_are_likely_to_take():
    assert Resources(0, 256, 255).likely_blocks == 1
    assert Resources(0, 256, 255, likely_registers=120).likely_blocks == 2


def test_in_words():
    taken = Resources(100_000, 128, 255, (Spill((), 6), Spill((0, 0), 2)))
    assert taken.show(H100) == (
        "takes 100000 bytes of shared memory and up to 255 registers for each of 128 threads, 8 bytes of each spilled; "
        "at least 2 on a multiprocessor at a time"
    )
