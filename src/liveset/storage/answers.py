"""What an error of the object store client means: whether the store said no, or may say something else later."""

from __future__ import annotations

import re

from liveset.errors import AccessDenied, DatasetError, NotFound, StorageError
from liveset.storage.location import Location

__all__ = ["NO_CREDENTIALS", "NoRanges", "PastTheEnd", "Refused", "Silent", "explain", "first_line"]


class Refused(DatasetError):
    """The condition of a put did not hold, or the object was written and the answer lost."""

    file: str


class PastTheEnd(DatasetError):
    """A range begins behind the end of the object."""


class NoRanges(StorageError):
    """The server only hands out whole objects."""


class Silent(DatasetError):
    """No answer, or one that may be better later."""

    file: str
    busy: bool = False
    """There are too many requests for it."""
    nobody: bool = False
    """There is no server at the address."""

    def error(self) -> StorageError:
        return StorageError(*self.args, file=self.file)


def explain(error: Exception, location: Location, key: str, action: str) -> DatasetError | None:
    """What an error of the client means; None for those that are not its own."""
    from obstore import exceptions

    url = f"{location.url}/{key.removeprefix(location.prefix).lstrip('/')}".rstrip("/")
    text = re.sub(r"(https?://[^/\s]*)\S*", r"\1", str(error))  # without names of objects, which may be anything
    answered = re.search(r"status code: (\d{3})", text)
    status = int(answered.group(1)) if answered else 0

    def failed(reason: str) -> StorageError:
        return StorageError(f"cannot {action} {url}: {reason}", file=url)

    def denied(reason: str) -> AccessDenied:
        return AccessDenied(f"cannot {action} {url}: {reason}", file=url)

    if isinstance(error, exceptions.AlreadyExistsError | exceptions.PreconditionError):
        return Refused(f"{url} is not the expected one.", file=url)
    if isinstance(error, FileNotFoundError):
        if re.search(r"NoSuchBucket|ContainerNotFound|bucket does not exist", text):
            where = f"there is no bucket {location.bucket!r} at {location.endpoint or location.kind}"
            return StorageError(f"{where}, so there is no {location.url}: create the bucket, or correct its name.", file=url)
        return NotFound(f"{url} does not exist.", file=url)
    if not isinstance(error, exceptions.BaseError | OSError):
        return None
    if re.search(r"ExpiredToken|TokenRefreshRequired|token (has )?expired|Signature not valid in the specified time", text, re.IGNORECASE):
        return denied("the credentials have expired.")
    if isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError) or re.search(
        r"InvalidAccessKeyId|SignatureDoesNotMatch|InvalidToken|AccessDenied|AuthenticationFailed", text
    ):
        return denied(
            f"the store refuses it ({_reason(text)}). Check the credentials and their rights, or for a public bucket pass "
            'storage_options={"skip_signature": True}.'
        )
    if re.search(_METADATA, str(error)):
        return denied(
            f"{NO_CREDENTIALS}. Set them in the environment or in storage_options, or for a public bucket pass "
            'storage_options={"skip_signature": True}.'
        )
    if re.search(r"without LOCATION|PermanentRedirect|AuthorizationHeaderMalformed|IllegalLocationConstraint", text):
        return failed('the bucket is in another region. Pass it as storage_options={"region": "..."}, or set AWS_REGION.')
    if "InvalidCertificate" in text:
        return failed(
            f"the certificate of {location.endpoint or location.bucket} is not trusted. Pass the file of its authority as "
            'storage_options={"verify": "ca.pem"}.'
        )
    if status == 416 or "Wanted range starting at" in text:
        return PastTheEnd(f"{url} ends earlier.", file=url)
    if isinstance(error, exceptions.NotSupportedError):
        return (NoRanges if "Range request" in text else StorageError)(
            f"cannot {action} {url}: this server cannot do that ({first_line(text)}).", file=url
        )
    if "builder error" in text:
        return failed(f"{location.endpoint or location.bucket} is not an address that works here.")
    if (400 <= status < 500 or status == 501) and status not in _PASSING and "RequestTimeout" not in text:
        return failed(f"the store refuses it ({_reason(text)}).")
    busy = status in (429, 503) or re.search(_BUSY, text) is not None
    nobody = re.search(_NOBODY, text) is not None
    return Silent(f"cannot {action} {url}: the store does not answer ({_reason(text)})", file=url, busy=busy, nobody=nobody)


_METADATA = r"//169\.254\.169\.254|//metadata\.google|/latest/(api/token|meta-data/)|Error getting credentials|MissingCredential"
"""What is asked for credentials at last, where nothing else gives any."""
NO_CREDENTIALS = "no credentials were found"
_BUSY = r"<Code>(SlowDown|ServerBusy|TooManyRequests|Throttling\w*|RequestLimitExceeded)</Code>"
"""What stores say that have too many requests, with whatever status."""
_NOBODY = r'"dns error"|failed to lookup address|ConnectionRefused|Connection refused'
"""An address without a server, or none at all."""
_PASSING = (408, 409, 425, 429)
"""Refusals that may be over soon."""


def _reason(text: str) -> str:
    """The telling part of an error of the client, whose text goes on with a dump of its fields."""
    code = re.search(r"<Code>([^<]+)</Code>(?:.*?<Message>([^<]+)</Message>)?", text, re.DOTALL)
    if code:
        return " ".join(": ".join(part for part in code.groups() if part).split())
    sources = re.findall(r"status (?:code )?(\d{3}[^\n:{]*)|error sending request|(?:message|error): \"([^\"]+)\"", text)
    found = [part for pair in sources for part in pair if part]
    return found[-1].strip() if found else first_line(text)


def first_line(error: object) -> str:
    """The first line of what an error says."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
