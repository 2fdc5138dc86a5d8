"""The replay of CUDA's caching allocator, against sizes worked out by hand from its rules."""

from tools.planner.allocator_replay import MIB, Allocator, reserved_bytes, segment_size


def test_segment_sizes():
    assert segment_size(512) == 2 * MIB
    assert segment_size(MIB) == 2 * MIB
    assert segment_size(MIB + 512) == 20 * MIB
    assert segment_size(10 * MIB) == 10 * MIB
    assert segment_size(11 * MIB) == 12 * MIB  # in steps of 2 MiB


def test_small_blocks_share_a_segment_and_large_ones_split_it():
    allocator = Allocator()
    for key in range(4):
        allocator.allocate(key, MIB // 2, 0)
    assert allocator.reserved == 2 * MIB
    allocator.allocate("fifth", 1, 0)  # 512 bytes, and no room is left
    assert allocator.reserved == 4 * MIB
    allocator.allocate("large", 6 * MIB, 0)  # a segment of 20, of which 14 stay
    allocator.allocate("beside", 13 * MIB, 0)
    assert allocator.reserved == 24 * MIB


def test_freed_neighbours_join_and_are_used_again():
    allocator = Allocator()
    for key in ("a", "b", "c"):
        allocator.allocate(key, 5 * MIB, 0)
    allocator.free("a")
    allocator.free("b")
    allocator.allocate("ten", 10 * MIB, 0)  # exactly the two
    assert allocator.reserved == 20 * MIB
    allocator.free("ten")
    allocator.free("c")
    allocator.allocate("all", 20 * MIB, 0)
    assert allocator.reserved == 20 * MIB == allocator.peak


def test_the_smallest_block_that_fits_is_taken():
    allocator = Allocator()
    allocator.allocate("large", 40 * MIB, 0)
    allocator.allocate("small", 12 * MIB, 0)
    allocator.free("large")
    allocator.free("small")
    allocator.allocate("one", 12 * MIB, 0)
    allocator.allocate("two", 40 * MIB, 0)  # would not fit any more if the first had cut the larger one
    assert allocator.reserved == 52 * MIB


def test_a_large_rest_below_a_mebibyte_is_not_cut_off():
    allocator = Allocator()
    allocator.allocate("whole", 20 * MIB, 0)
    allocator.free("whole")
    allocator.allocate("most", 19 * MIB, 0)
    allocator.allocate("rest", MIB + 512, 0)  # does not find the last mebibyte
    assert allocator.reserved == 40 * MIB


def test_streams_do_not_share_freed_blocks():
    log = [(1, 20 * MIB, 0), (1, 0, 0), (2, 20 * MIB, 1), (2, 0, 1)]
    assert reserved_bytes(log, 0) == 40 * MIB
    assert reserved_bytes([(n, size, 0) for n, size, _ in log], 0) == 20 * MIB


def test_the_state_stays_through_every_step_and_steps_repeat():
    """30 MiB of state, then a step of 20 that goes again: two steps need no more than one."""
    assert reserved_bytes([(1, 30 * MIB, 0), (2, 20 * MIB, 0), (2, 0, 0)], 1) == 50 * MIB
