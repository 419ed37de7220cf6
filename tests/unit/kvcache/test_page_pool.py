import pytest

from deepinfer_core.errors import CapacityError
from deepinfer_core.kvcache.allocator import OutOfPagesError, PagePool


def test_freed_pages_are_used_again_before_fresh_ones():
    pool = PagePool(8)
    first = pool.alloc(3)
    pool.free(first[1])
    assert pool.alloc(1) == [first[1]]
    assert pool.high_water == 3
    assert (pool.free_pages, pool.used_pages) == (5, 3)


def test_alloc_takes_all_or_nothing():
    pool = PagePool(4)
    pool.alloc(3)
    with pytest.raises(OutOfPagesError, match="2 KV pages asked for, 1 of 4 free"):
        pool.alloc(2)
    assert pool.free_pages == 1
    assert issubclass(OutOfPagesError, CapacityError)


def test_a_shared_page_is_free_after_its_last_reader():
    pool = PagePool(2)
    (page,) = pool.alloc()
    pool.share(page)
    assert pool.free(page) == 1
    assert pool.free_pages == 1
    assert pool.free(page) == 0
    assert pool.free_pages == 2
    assert pool.refs(page) == 0


def test_freeing_twice_and_sharing_a_free_page_are_caught():
    pool = PagePool(2)
    (page,) = pool.alloc()
    pool.free(page)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(page)
    with pytest.raises(AssertionError, match="cannot be shared"):
        pool.share(page)
