import pytest
import torch

from deepinfer_core.kvcache.allocator import OutOfPagesError
from deepinfer_core.kvcache.manager import FIRST_PAGES


def test_the_bytes_of_a_page_are_those_of_all_tensors_of_all_layers(make_kv):
    assert make_kv().page_bytes == 2 * (4 * 2 * 4 + 4 * 2)  # two layers of float32 pairs and float16 scales


def test_a_batch_names_positions_slots_and_pages_of_each_sequence(make_kv, fill):
    kv = make_kv(prefix_cache=False)
    a, b = kv.open(), kv.open()
    fill(kv, a, [1, 2, 3])
    kv.extend(a, 3)
    kv.extend(b, 2)
    batch = kv.batch([(a, 3), (b, 2)])
    assert batch.query_lens == (3, 2)
    assert batch.kv_lens == (6, 2)
    assert batch.page_ids == ((0, 1), (2,))
    assert batch.page_table.tolist() == [[0, 1], [2, 0]]
    assert batch.page_table.dtype == torch.int32
    assert batch.positions.tolist() == [3, 4, 5, 0, 1]
    assert batch.slots.tolist() == [3, 4, 5, 8, 9]


def test_memory_grows_with_use_and_keeps_what_it_holds(make_kv, fill, read):
    kv = make_kv(pages=5 * FIRST_PAGES)
    tensors = [id(layer) for layer in kv.tensors]
    assert kv.nbytes == FIRST_PAGES * kv.page_bytes
    seq = kv.open()
    fill(kv, seq, list(range(4 * FIRST_PAGES)))
    assert kv.nbytes == FIRST_PAGES * kv.page_bytes
    fill(kv, seq, [7, 8])
    assert kv.nbytes == 2 * FIRST_PAGES * kv.page_bytes
    assert [id(layer) for layer in kv.tensors] == tensors
    assert read(kv, seq) == [*range(4 * FIRST_PAGES), 7, 8]
    fill(kv, seq, list(range(4 * 4 * FIRST_PAGES - 2)))
    assert kv.nbytes == kv.total_pages * kv.page_bytes
    kv.free(seq)
    kv.assert_no_leaks()


def test_a_failed_growth_returns_the_pages(make_kv, monkeypatch):
    kv = make_kv(pages=2 * FIRST_PAGES)
    seq = kv.open()

    def refuse(*_, **__):
        raise torch.OutOfMemoryError("no memory for you")

    monkeypatch.setattr(torch, "zeros", refuse)
    with pytest.raises(torch.OutOfMemoryError):
        kv.extend(seq, 4 * (FIRST_PAGES + 1))
    monkeypatch.undo()
    assert kv.available_pages == 2 * FIRST_PAGES
    kv.extend(seq, 4 * (FIRST_PAGES + 1))
    kv.free(seq)
    kv.assert_no_leaks()


def test_extend_beyond_the_pool_changes_nothing(make_kv):
    kv = make_kv(pages=2)
    seq = kv.open()
    kv.extend(seq, 4)
    with pytest.raises(OutOfPagesError, match="2 KV pages asked for, 1 of 2"):
        kv.extend(seq, 12)
    assert len(seq.pages) == 1


def test_a_fork_shares_full_pages_and_copies_the_one_in_use(make_kv, fill, read):
    kv = make_kv(prefix_cache=False)
    seq = kv.open()
    fill(kv, seq, [1, 2, 3, 4, 5])
    twin = kv.fork(seq)
    assert twin.pages[0] == seq.pages[0]
    assert twin.pages[1] != seq.pages[1]
    fill(kv, seq, [6])
    fill(kv, twin, [9])
    assert read(kv, seq) == [1, 2, 3, 4, 5, 6]
    assert read(kv, twin) == [1, 2, 3, 4, 5, 9]
    kv.free(seq)
    assert read(kv, twin) == [1, 2, 3, 4, 5, 9]
    kv.free(twin)
    kv.assert_no_leaks()


@pytest.mark.parametrize("remembered", [True, False])
def test_forks_of_cached_prompts_leave_nothing_behind(make_kv, fill, remembered):
    kv = make_kv()
    seq = kv.open()
    fill(kv, seq, [1, 2, 3, 4, 5])
    if remembered:
        kv.remember(seq, [1, 2, 3, 4, 5])
    twin = kv.fork(seq)
    for one in (seq, twin):
        fill(kv, one, [6, 7, 8])
        kv.remember(one, [1, 2, 3, 4, 5, 6, 7, 8])
    kv.free(seq)
    kv.free(twin)
    kv.assert_no_leaks()
    assert kv.prefix.pages == (2 if remembered else 0)


def test_scrubbed_pages_read_zero_for_the_next_owner(make_kv, fill):
    kv = make_kv()
    seq = kv.open()
    fill(kv, seq, [5, 5])
    kv.tensors[0]["k"][seq.pages[0]] = float("nan")
    page = seq.pages[0]
    kv.free(seq, scrub=True)
    assert kv.tensors[0]["k"][page].tolist() == [[0, 0]] * 4


def test_the_leak_check_sees_an_open_sequence(make_kv):
    kv = make_kv()
    seq = kv.open()
    with pytest.raises(AssertionError, match="still open"):
        kv.assert_no_leaks()
    kv.free(seq)
    kv.assert_no_leaks()
    kv.pool.alloc()
    with pytest.raises(AssertionError, match="1 pages in use, 0 cached"):
        kv.assert_no_leaks()


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("length", [1, 4, 9, 17])
def test_shared_pages_counts_what_freeing_would_not_free(make_kv, fill, prefix_cache, length):
    kv = make_kv(pages=16, prefix_cache=prefix_cache)
    tokens = list(range(length))
    seq = kv.open()
    fill(kv, seq, tokens)
    kv.remember(seq, tokens)
    assert kv.shared_pages(seq) == 0
    twin = kv.fork(seq)
    assert kv.shared_pages(seq) == kv.shared_pages(twin) == length // 4
    before = kv.available_pages
    shared, held = kv.shared_pages(seq), len(seq.pages)
    kv.free(seq)
    assert kv.available_pages == before + held - shared
    assert kv.shared_pages(twin) == 0
    kv.free(twin)
    kv.assert_no_leaks()
