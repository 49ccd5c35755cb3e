"""Safetensors files: those of the safetensors package are read and written, and every broken one is refused."""

import io
import json
import pickle
import re
import zipfile

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from octavo.checkpoints.tensor_file import DTYPES, LARGEST_HEADER, Digest, read, write
from octavo.errors import InvalidCheckpoint, Unsupported
from tests.strange.states import default_dtype

SHAPES = ((), (3,), (2, 5), (0,), (4, 0, 2))


def some_tensors():
    generator = torch.Generator().manual_seed(0)
    found = {}
    for name, dtype in DTYPES.items():
        for shape in SHAPES:
            raw = torch.randint(0, 2 if dtype == torch.bool else 100, shape, generator=generator)
            cast = raw.to(torch.float32).to(dtype) if dtype.is_floating_point else raw.to(dtype)
            found[f"layers.{name}.{'x'.join(map(str, shape))}"] = cast
    return found


def assert_equal(found, wanted):
    assert set(found) == set(wanted)
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        if tensor.numel():
            bytes_of = [t.contiguous().reshape(-1).view(torch.uint8) for t in (found[name], tensor)]
            assert torch.equal(*bytes_of), name


# -- both ways with the package ----------------------------------------------------------------------------------------


def test_every_dtype_and_shape_comes_back(tmp_path):
    tensors = some_tensors()
    digest = write(tmp_path / "a.safetensors", tensors, {"format": "pt", "ä": "ö"})
    file = read(tmp_path / "a.safetensors", digest)
    assert_equal(file.tensors, tensors)
    assert file.metadata == {"format": "pt", "ä": "ö"} and file.digest == digest
    assert digest.bytes == (tmp_path / "a.safetensors").stat().st_size


def test_the_safetensors_package_reads_and_writes_the_same(tmp_path):
    tensors = some_tensors()
    write(tmp_path / "ours.safetensors", tensors)
    assert_equal(load_file(tmp_path / "ours.safetensors"), tensors)
    save_file(tensors, tmp_path / "theirs.safetensors", {"format": "pt"})
    theirs = read(tmp_path / "theirs.safetensors")
    assert_equal(theirs.tensors, tensors)
    assert theirs.metadata == {"format": "pt"}


AROUND = {
    "meta as the default device": lambda: torch.device("meta"), "inference mode": torch.inference_mode,
    "another default dtype": lambda: default_dtype(torch.float64),
}  # fmt: skip


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
def test_the_programs_defaults_do_not_reach_a_file(around, tmp_path):
    tensors = some_tensors()
    with around():
        digest = write(tmp_path / "a", tensors)
        found = read(tmp_path / "a", digest).tensors
    assert_equal(found, tensors)
    assert {tensor.device.type for tensor in found.values()} == {"cpu"}


def test_views_are_written_by_their_values(tmp_path):
    base = torch.arange(24.0).view(4, 6)
    views = {
        "transposed": base.T,
        "part": base[1:3, ::2],
        "expanded": base[:, :1].expand(4, 6),
        "conjugate": torch.view_as_complex(base.view(4, 3, 2).contiguous()).conj(),
        "parameter": nn.Parameter(base),
        "same": base,
    }
    write(tmp_path / "a", views)
    assert_equal(read(tmp_path / "a").tensors, {name: view.detach().resolve_conj() for name, view in views.items()})


def test_no_tensors_are_a_file_too(tmp_path):
    write(tmp_path / "a", {})
    assert read(tmp_path / "a").tensors == {} == load_file(tmp_path / "a")


class Marked(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "value",
    [
        "text", None, 3, torch.ones(2).to_sparse(), torch.ones(2, device="meta"), torch.ones(2).as_subclass(Marked),
        torch.zeros(2, dtype=torch.complex128),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_what_no_file_holds_is_refused_by_name_before_there_is_a_file(value, tmp_path):
    with pytest.raises(Unsupported, match=r"odd\.one"):
        write(tmp_path / "a", {"even": torch.ones(2), "odd.one": value})
    assert not (tmp_path / "a").exists()


# -- broken files ------------------------------------------------------------------------------------------------------

TENSORS = {"a": torch.arange(6, dtype=torch.int16).view(2, 3), "b": torch.tensor([True, False]), "c": torch.zeros(0, 3)}


def file_of(header, data=bytes(14)):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def good():
    return {
        "a": {"dtype": "I16", "shape": [2, 3], "data_offsets": [0, 12]},
        "b": {"dtype": "BOOL", "shape": [2], "data_offsets": [12, 14]},
    }


def with_entry(**changes):
    header = good()
    header["b"] |= changes
    return header


def repeated(name):
    """A header that has an entry twice, with different dtypes."""
    text, entry = json.dumps(good()), json.dumps(good()[name] | {"dtype": "U8"})
    return f'{text[:-1]}, "{name}": {entry}}}'.encode()


def zipped():
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("data.pkl", bytes(200))
    return stream.getvalue()


BROKEN = {
    "empty": (b"", "header too small"),
    "seven bytes": (bytes(7), "header too small"),
    "a header of no bytes": (bytes(8), "invalid JSON"),
    "2^63": ((2**63).to_bytes(8, "little") + b"{}", "header too large"),
    "2^64 - 1": (b"\xff" * 8 + b"{}", "header too large"),
    "longer than the file": (b"\x03" + bytes(7) + b"{}", "invalid header length"),
    "no JSON": (file_of(b"{'a': 1}"), "invalid JSON in header: key must be a string"),
    "no UTF-8": (file_of(b'{"\xff": 1}'), "invalid UTF-8"),
    "half of a header": (file_of(json.dumps(good()).encode()[:-9]), "invalid JSON"),
    "deep": (file_of(b"[" * 200_000), "invalid JSON"),
    "deep in an entry": (file_of(b'{"a":' + b'{"a":' * 50_000 + b"1" + b"}" * 50_001), "recursion limit"),
    "a huge number": (file_of(b'{"a": ' + b"9" * 10_000 + b"}"), "number out of range"),
    "a list": (file_of([good()]), "invalid type: sequence"),
    "a number": (file_of(3), "invalid type: integer"),
    "a name twice": (
        file_of(json.dumps(good())[:-1].encode() + b', "b":' + json.dumps(good()["b"]).encode() + b"}"),
        "'b' twice",
    ),
    "metadata of numbers": (file_of({"__metadata__": {"a": 1}} | good()), "invalid type: integer"),
    "metadata of lists": (file_of({"__metadata__": []} | good()), "invalid type: sequence"),
    "an entry that is none": (file_of(good() | {"b": None}), "invalid type: null"),
    "a key too many": (file_of(with_entry(strides=[1])), "an entry has dtype, shape and data_offsets"),
    "an unknown dtype": (file_of(with_entry(dtype="F7")), "unknown variant `F7`"),
    "a dtype of the package alone": (file_of(with_entry(dtype="F8_E4M3FNUZ")), "F8_E4M3FNUZ, and the known ones are"),
    "a dtype of half a byte": (file_of(with_entry(dtype="F4", shape=[4])), "dtype F4, and the known ones are"),
    "a dtype that is no text": (file_of(with_entry(dtype=["BOOL"])), "invalid type: sequence"),
    "a wider dtype": (file_of(with_entry(dtype="F64")), "invalid shape, data type, or offset"),
    "a wider shape": (file_of(with_entry(shape=[3])), "invalid shape, data type, or offset"),
    "a negative size": (file_of(with_entry(shape=[-2])), "integer `-2`, expected usize"),
    "two negative sizes": (file_of(with_entry(shape=[-2, -1])), "integer `-2`, expected usize"),
    "a size of true": (file_of(with_entry(shape=[True, 2])), "boolean `true`, expected usize"),
    "a size of 2.0": (file_of(with_entry(shape=[2.0])), "`2.0`, expected usize"),
    "sizes that overflow": (
        file_of(with_entry(shape=[2**62, 2**62, 0], data_offsets=[12, 12])),
        "overflow computing",
    ),
    "sizes past 2^63": (file_of(with_entry(shape=[2**70])), "expected usize"),
    "a hundred dims": (file_of(with_entry(shape=[1] * 99 + [2])), "has the shape .* of more than 32 sizes"),
    "a shape of text": (file_of(with_entry(shape="2")), 'string "2", expected a sequence'),
    "offsets of three": (file_of(with_entry(data_offsets=[12, 13, 14])), "invalid length 3, expected 2"),
    "offsets reversed": (file_of(with_entry(data_offsets=[14, 12])), "invalid offset for tensor `b`"),
    "negative offsets": (file_of(with_entry(data_offsets=[-2, 0])), "integer `-2`, expected usize"),
    "offsets past the end": (file_of(with_entry(data_offsets=[13, 15])), "invalid offset for tensor `b`"),
    "offsets far past the end": (file_of(with_entry(data_offsets=[2**61, 2**61 + 2])), "invalid offset for tensor `b`"),
    "a tensor past the end": (file_of(with_entry(shape=[99], data_offsets=[12, 111])), "file not fully covered"),
    "overlapping": (file_of(with_entry(data_offsets=[11, 13])), "invalid offset for tensor `b`"),
    "the same bytes": (file_of(good() | {"c": good()["a"]}), "invalid offset for tensor"),
    "a gap": (file_of(with_entry(data_offsets=[13, 15]), bytes(15)), "invalid offset for tensor `b`"),
    "bytes at the end": (file_of(good(), bytes(15)), "file not fully covered"),
    "a bool of 7": (file_of(good(), bytes(12) + b"\x01\x07"), "'b' is BOOL"),
    "a pickle": (pickle.dumps({"a": list(range(99))}), "a pickle can run code"),
    "an old pickle": (pickle.dumps({"a": list(range(99))}, protocol=2), "a pickle can run code"),
    "a file of torch.save": (zipped(), "a pickle can run code"),
    "a picture": (b"\x89PNG\r\n\x1a\n" + bytes(99), "header too large"),
    "a text": (b"the quick brown fox jumps over the lazy dog", "header too large"),
}


@pytest.mark.parametrize(("content", "sentence"), BROKEN.values(), ids=BROKEN)
def test_a_broken_file_is_refused_in_a_sentence(content, sentence, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(InvalidCheckpoint, match=sentence) as unsupported_reason:
        read(path)
    text = str(unsupported_reason.value)
    assert text.startswith(f"{path} is damaged or no file of a checkpoint: ") and text.endswith(
        "Load another checkpoint."
    )
    assert len(text) < 1000


def test_the_good_file_of_these_cases_is_read(tmp_path):
    (tmp_path / "a").write_bytes(file_of(good()))
    assert {name: tuple(t.shape) for name, t in read(tmp_path / "a").tensors.items()} == {"a": (2, 3), "b": (2,)}


def test_a_huge_header_is_not_read(tmp_path):
    with open(tmp_path / "a", "wb") as file:
        file.write((LARGEST_HEADER + 1).to_bytes(8, "little"))
        file.truncate(LARGEST_HEADER + 100)  # without memory on the disk
    with pytest.raises(InvalidCheckpoint, match="header too large"):
        read(tmp_path / "a")


def test_a_folder_and_a_file_that_is_not_there_are_refused(tmp_path):
    for path, why in ((tmp_path, "Is a directory"), (tmp_path / "none", "No such file")):
        with pytest.raises(InvalidCheckpoint, match=f"{re.escape(str(path))} could not be read: {why}"):
            read(path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """(the bytes of a file, its digest, a path to write to)"""
    path = tmp_path_factory.mktemp("whole") / "a"
    digest = write(path, TENSORS, {"format": "pt"})
    return path.read_bytes(), digest, path


def test_a_file_cut_off_anywhere_is_refused(whole):
    content, digest, path = whole
    for length in range(len(content)):
        path.write_bytes(content[:length])
        for expected in (None, digest):
            with pytest.raises(InvalidCheckpoint):
                read(path, expected)


def test_one_changed_byte_anywhere_is_refused(whole):
    content, digest, path = whole
    for at in range(len(content)):
        for bit in (1, 0x20, 0x80):
            path.write_bytes(content[:at] + bytes([content[at] ^ bit]) + content[at + 1 :])
            with pytest.raises(InvalidCheckpoint):
                read(path, digest)


def test_another_digest_is_refused(whole):
    content, digest, path = whole
    path.write_bytes(content)
    assert read(path, digest).digest == digest
    for other in (Digest(digest.bytes, "0" * 64), Digest(digest.bytes + 1, digest.sha256)):
        with pytest.raises(InvalidCheckpoint, match="was written with"):
            read(path, other)


def assert_read_or_refused(path, content):
    """Without a digest: a file that is read has the names and shapes of its header, and all of its bytes."""
    path.write_bytes(content)
    try:
        file = read(path)
    except InvalidCheckpoint:
        return
    size = sum(tensor.numel() * tensor.element_size() for tensor in file.tensors.values())
    header = int.from_bytes(content[:8], "little")
    assert 8 + header + size == len(content)
    assert {name for name in json.loads(content[8 : 8 + header]) if name != "__metadata__"} == set(file.tensors)


many = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@many
@given(st.binary(max_size=64))
def test_random_bytes_are_read_or_refused(whole, content):
    assert_read_or_refused(whole[2], content)


@many
@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=6), st.integers(-9, 9))
def test_a_file_with_changed_bytes_is_read_or_refused(whole, changes, more):
    content = bytearray(whole[0])
    for at, value in changes:
        content[at % len(content)] = value
    assert_read_or_refused(whole[2], bytes(content[:more] if more < 0 else content + bytes(more)))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**65), 2**65) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@many
@given(st.sampled_from(["a", "b", "__metadata__"]), st.sampled_from(["dtype", "shape", "data_offsets", None]), JSON)
def test_a_header_with_another_value_is_read_or_refused(whole, name, field, value):
    header = good() | {"__metadata__": {}}
    if field is None:
        header[name] = value
    else:
        header[name][field] = value
    assert_read_or_refused(whole[2], file_of(header))
