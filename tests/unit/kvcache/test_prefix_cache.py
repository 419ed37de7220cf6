import random

import pytest

from deepinfer_core.kvcache import prefix
from deepinfer_core.kvcache.allocator import OutOfPagesError


def finish(kv, fill, tokens, **options):
    seq = kv.open(tokens, **options)
    fill(kv, seq, tokens[seq.length :])
    kv.remember(seq, tokens)
    return seq


@pytest.mark.parametrize(("length", "cached"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8)])
def test_the_last_token_is_always_left_to_compute(make_kv, fill, length, cached):
    kv = make_kv()
    tokens = list(range(length))
    kv.free(finish(kv, fill, tokens))
    again = kv.open(tokens)
    assert again.length == again.cached == cached
    kv.free(again)
    kv.assert_no_leaks()


def test_readers_share_pages_and_never_write_them(make_kv, fill, read):
    kv = make_kv()
    first = finish(kv, fill, [1, 2, 3, 4, 5])
    second = finish(kv, fill, [1, 2, 3, 4, 9])
    assert second.pages[0] == first.pages[0]
    assert kv.pool.refs(first.pages[0]) == 3
    assert read(kv, first) == [1, 2, 3, 4, 5]
    assert read(kv, second) == [1, 2, 3, 4, 9]


def test_a_page_computed_twice_is_kept_once(make_kv, fill, read):
    kv = make_kv()
    a, b = kv.open(), kv.open()
    fill(kv, a, [1, 2, 3, 4, 5])
    fill(kv, b, [1, 2, 3, 4, 6])
    kv.remember(a, [1, 2, 3, 4, 5])
    used = kv.pool.used_pages
    kv.remember(b, [1, 2, 3, 4, 6])
    assert kv.pool.used_pages == used - 1
    assert b.pages[0] == a.pages[0]
    assert read(kv, b) == [1, 2, 3, 4, 6]
    assert kv.batch_at([(b, 4, 1)]).page_table.tolist() == [b.pages]
    kv.free(a)
    kv.free(b)
    kv.assert_no_leaks()


@pytest.mark.parametrize("bits", [0, 2])
def test_equal_hashes_never_share_a_page(make_kv, fill, read, monkeypatch, bits):
    """KV-04: a poor hash costs hits, never an answer."""
    monkeypatch.setattr(prefix, "page_key", lambda tokens: hash(tokens) % (1 << bits))
    kv = make_kv(pages=600)
    rng = random.Random(4)
    prompts = [[rng.randrange(3) for _ in range(40)] for _ in range(50)]
    for prompt in prompts * 2:
        seq = finish(kv, fill, prompt)
        assert read(kv, seq) == prompt
        kv.free(seq)
    kv.assert_no_leaks()
    again = kv.open(prompts[0])
    assert again.cached > 0  # the first comer's chain is found in full
    kv.free(again)


def test_salts_that_are_used_once_leave_nothing_behind(make_kv, fill):
    kv = make_kv(pages=4)
    for salt in range(50):
        kv.free(kv.open([1, 2, 3, 4, 5], salt=f"asks only {salt}"))
        kv.free(finish(kv, fill, [1, 2, 3, 4, 5], salt=salt))
    assert len(kv.prefix._roots) <= 4
    assert kv.open([1, 2, 3, 4, 5], salt=49).cached == 4


def test_salts_and_reuse_off_keep_prompts_apart(make_kv, fill):
    kv = make_kv()
    kv.free(finish(kv, fill, [1, 2, 3, 4, 5], salt="a"))
    for options in ({"salt": "b"}, {}, {"salt": "a", "reuse": False}):
        seq = kv.open([1, 2, 3, 4, 5], **options)
        assert seq.cached == 0
        kv.free(seq)
    seq = kv.open([1, 2, 3, 4, 5], salt="a")
    assert seq.cached == 4
    kv.free(seq)


def test_the_least_recently_used_chain_goes_first_from_its_end(make_kv, fill):
    kv = make_kv(pages=4)
    old, new = [1, 2, 3, 4, 5, 6, 7, 8, 9], [21, 22, 23, 24, 25]
    kv.free(finish(kv, fill, old))
    kv.free(finish(kv, fill, new))
    assert (kv.prefix.pages, kv.pool.free_pages) == (3, 1)
    seq = kv.open()
    kv.extend(seq, 8)  # one page more than is free
    assert kv.prefix.evictions == 1
    hit = kv.open(old)
    assert hit.cached == 4  # its second page went, its first is there: no hole
    kv.free(hit)
    kv.free(seq)
    kv.assert_no_leaks()


def test_pages_with_readers_are_never_evicted(make_kv, fill):
    kv = make_kv(pages=3)
    seq = finish(kv, fill, [1, 2, 3, 4, 5])
    other = kv.open()
    kv.extend(other, 4)
    assert kv.available_pages == 0
    with pytest.raises(OutOfPagesError, match="can be had"):
        kv.extend(other, 5)
    assert kv.prefix.pages == 1
    kv.free(seq)
    kv.extend(other, 12)
    kv.free(other)
    kv.assert_no_leaks()


def test_random_lives_leave_no_hole_and_no_leak(make_kv, fill, read):
    kv = make_kv(pages=24)
    rng = random.Random(7)
    alive = []
    for _ in range(3000):
        if alive and (len(alive) > 4 or rng.random() < 0.4):
            seq, _ = alive.pop(rng.randrange(len(alive)))
            kv.free(seq)
            continue
        tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 18))]
        seq = kv.open(tokens)
        assert read(kv, seq) == tokens[: seq.length]
        fill(kv, seq, tokens[seq.length :])
        if rng.random() < 0.8:
            kv.remember(seq, tokens)
        assert all(read(kv, one) == wanted for one, wanted in alive)
        alive.append((seq, tokens))
        if kv.available_pages and rng.random() < 0.3:
            alive.append((kv.fork(seq), tokens))
    for seq, _ in alive:
        kv.free(seq)
    kv.assert_no_leaks()
    assert kv.prefix.evictions > 0
    kv.prefix.clear()
    assert kv.pool.free_pages == 24
