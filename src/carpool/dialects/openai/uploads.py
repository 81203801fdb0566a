"""Uploads: the lines of a batch become a file before the batch is bought."""

from __future__ import annotations

import msgspec

from carpool.core.model import Headers
from carpool.core.ports import Ask
from carpool.dialects.openai.providers import CompatibleProvider
from carpool.dialects.openai.shapes import name_of, nonce_of
from carpool.dialects.provider_api import IDENTITY, checked_id, decode, path_of

FILES = "/v1/files"
_FIELD = b'--%b\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n'
_CONTENT = (
    b'--%b\r\nContent-Disposition: form-data; name="file"; filename="%b"\r\nContent-Type: application/jsonl\r\n\r\n'
)


class _File(msgspec.Struct):
    id: str
    filename: str = ""


class _Files(msgspec.Struct):
    data: list[_File]


_FILE = msgspec.json.Decoder(_File)
_FILES = msgspec.json.Decoder(_Files)


class OpenAIUploads:
    """`ports.Uploads`, and `ports.UploadNames` for providers whose batches carry no nonce."""

    def __init__(self, provider: CompatibleProvider) -> None:
        self._provider = provider

    def frame(self, nonce: str) -> tuple[bytes, bytes, bytes]:
        """The multipart form around the lines. Lines have no line breaks, so none can contain the form's boundary."""
        provider, boundary, name = self._provider, _boundary(nonce).encode(), f"{name_of(nonce)}.jsonl"
        fields = [*provider.form, *((("file_name", name),) if provider.names_file else ())]
        head = b"".join(_FIELD % (boundary, key.encode(), value.encode()) for key, value in fields)
        return head + _CONTENT % (boundary, name.encode()), b"\n", b"\n\r\n--%b--\r\n" % boundary

    def upload(self, headers: Headers, nonce: str) -> Ask:
        form = ("content-type", f"multipart/form-data; boundary={_boundary(nonce)}")
        return Ask("POST", self._provider.uploads, (*headers, *self._provider.headers, form, IDENTITY))

    def file_id(self, body: bytes) -> str:
        return checked_id(decode(_FILE, body, "The provider's answer to an upload").id)

    def delete(self, headers: Headers, file_id: str) -> Ask:
        return Ask("DELETE", path_of(FILES, file_id), (*headers, *self._provider.headers, IDENTITY))

    def list_files(self, headers: Headers) -> Ask:
        return Ask("GET", FILES, (*headers, *self._provider.headers, IDENTITY))

    def nonces(self, body: bytes) -> dict[str, str]:
        files = decode(_FILES, body, "The provider's list of files").data
        return {file.id: nonce for file in files if (nonce := nonce_of(file.filename))}


def _boundary(nonce: str) -> str:
    return f"carpool-form-{nonce}"
