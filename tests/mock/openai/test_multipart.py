"""Forms, however they are cut into pieces."""

import random

import pytest

from carpool.mock.openai.multipart import FormError, boundary_of, read_form


async def pieces(data, cuts):
    start = 0
    for cut in [*cuts, len(data)]:
        yield data[start:cut]
        start = cut


def form(*parts, edge=b"edge"):
    body = b"".join(
        b"--" + edge + b"\r\nContent-Disposition: form-data; " + head + b"\r\n\r\n" + content + b"\r\n"
        for head, content in parts
    )
    return body + b"--" + edge + b"--\r\n"


async def test_any_cut_gives_the_same_parts():
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(300):
        # What looks like a boundary, and what a boundary begins with, are what a careless reader trips over.
        content = b"".join(rng.choice([b"\r\n--edg", b"\r", b"\n", b"--edge", b"x" * 5, b"-"]) for _ in range(9))
        if b"\r\n--edge" in content:
            continue  # a client would have chosen another boundary
        name = b'name="file"; filename="a b.jsonl"\r\nContent-Type: application/jsonl'
        data = form((b'name="purpose"', b"batch"), (name, content), (b'name="z"', b""))
        cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.randrange(20)))
        got = await read_form(pieces(data, cuts), b"edge")
        assert {key: bytes(part.content) for key, part in got.items()} == {
            "purpose": b"batch",
            "file": content,
            "z": b"",
        }
        assert (got["file"].filename, got["purpose"].filename) == ("a b.jsonl", None)


async def test_byte_by_byte():
    data = form((b'name="a"', b"1\r\n2"), (b'name="b"', b"3"))
    got = await read_form(pieces(data, range(1, len(data))), b"edge")
    assert {key: bytes(part.content) for key, part in got.items()} == {"a": b"1\r\n2", "b": b"3"}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (form((b'name="a"', b"1"))[:-4], "ends before"),
        (b"", "ends before"),
        (form((b"filename=x", b"1")), "no name"),
        (b"--edge\r\n" + b"x" * 20_000, "too long"),
    ],
)
async def test_what_is_no_form(data, said):
    with pytest.raises(FormError, match=said):
        await read_form(pieces(data, ()), b"edge")


def test_boundaries():
    assert boundary_of("multipart/form-data; boundary=abc") == b"abc"
    assert boundary_of('Multipart/Form-Data; charset=utf-8; boundary="a b"') == b"a b"
    for wrong in ("", "application/json", "multipart/form-data"):
        with pytest.raises(FormError):
            boundary_of(wrong)
