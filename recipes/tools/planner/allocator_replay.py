"""What CUDA's caching allocator would reserve for a sequence of allocations: torch's c10/cuda/CUDACachingAllocator.cpp,
with its default settings (no expandable segments, no limit on splitting).

Each stream has pools of its own; a freed block is used again only in its pool, which is why a GPU reserves more than
is ever live at once.
"""

import bisect
from dataclasses import dataclass, field

MIB = 2**20
MIN_BLOCK = 512  # every size is rounded up to it
SMALL = 1 * MIB  # up to here a block comes from the small pool
SMALL_SEGMENT, LARGE_SEGMENT = 2 * MIB, 20 * MIB  # what is asked of the driver for them
LARGE = 10 * MIB  # from here a segment of its own, in steps of SMALL_SEGMENT
REPEATS = 3  # the state, and steps until the pools have their shape


@dataclass(eq=False)
class Block:
    """A piece of a segment, between its neighbours."""

    size: int
    pool: tuple[int, bool]  # stream, whether small
    number: int
    is_free: bool = False
    before: "Block | None" = None
    after: "Block | None" = None


@dataclass
class Allocator:
    """`reserved` and its peak, in bytes."""

    reserved: int = 0
    peak: int = 0
    made: int = 0
    pools: dict[tuple[int, bool], list[tuple[int, int, Block]]] = field(default_factory=dict)
    used: dict[object, Block] = field(default_factory=dict)

    def allocate(self, key: object, size: int, stream: int) -> None:
        """Take the smallest free block of the pool that is large enough, or ask the driver for a segment."""
        size = max(MIN_BLOCK, -(-size // MIN_BLOCK) * MIN_BLOCK)
        pool = (stream, size <= SMALL)
        free = self.pools.setdefault(pool, [])
        index = bisect.bisect_left(free, (size, -1))
        if index < len(free):
            block = free.pop(index)[2]
        else:
            block = self.new_block(segment_size(size), pool)
            self.reserved += block.size
            self.peak = max(self.peak, self.reserved)
        rest = block.size - size
        if rest >= MIN_BLOCK if pool[1] else rest > SMALL:
            piece = self.new_block(rest, pool)
            piece.before, piece.after = block, block.after
            if block.after is not None:
                block.after.before = piece
            block.after, block.size = piece, size
            self.put(piece)
        block.is_free = False
        self.used[key] = block

    def free(self, key: object) -> None:
        """Give a block back to its pool, joined with free neighbours."""
        block = self.used.pop(key)
        for other in (block.before, block.after):
            if other is not None and other.is_free:
                pool = self.pools[other.pool]
                pool.pop(bisect.bisect_left(pool, (other.size, other.number)))
                first, second = (other, block) if other is block.before else (block, other)
                first.size, first.after = first.size + second.size, second.after
                if second.after is not None:
                    second.after.before = first
                block = first
        self.put(block)

    def put(self, block: Block) -> None:
        """Keep a free block by size."""
        block.is_free = True
        bisect.insort(self.pools[block.pool], (block.size, block.number, block))

    def new_block(self, size: int, pool: tuple[int, bool]) -> Block:
        """A block with a number of its own: equal sizes are told apart by age."""
        self.made += 1
        return Block(size, pool, self.made)


def segment_size(size: int) -> int:
    """Bytes that the allocator asks the driver for."""
    if size <= SMALL:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < LARGE else -(-size // SMALL_SEGMENT) * SMALL_SEGMENT


def reserved_bytes(log: list[tuple[int, int, int]], start: int) -> int:
    """Peak of reserved bytes over a few equal steps.

    `log` holds (number, bytes, stream), with bytes 0 where the storage of that number went; what comes before `start`
    is the state that a step begins with, and stays.
    """
    allocator = Allocator()
    for repeat in range(REPEATS):
        for key in [key for key in allocator.used if key[0] > 0]:
            allocator.free(key)  # what the step leaves behind, the next one's state has in its place
        for number, size, stream in log[:start] if repeat == 0 else log[start:]:
            key = (repeat, number)
            if size:
                allocator.allocate(key, size, stream)
            elif key in allocator.used:
                allocator.free(key)
    return allocator.peak
