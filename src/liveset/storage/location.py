"""Where a dataset lies on an object store: what a URL and the options of the caller say, without any request."""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import unquote

from liveset.errors import MissingDependency
from liveset.format.lazy import lazy

__all__ = ["Location", "Place", "parse_location", "plain_url"]

_KINDS = {
    "s3": "s3",
    "s3a": "s3",
    "r2": "s3",
    "gs": "gcs",
    "gcs": "gcs",
    "az": "azure",
    "azure": "azure",
    "abfs": "azure",
    "http": "http",
    "https": "http",
}
# The names of boto3's client and session, and what the object store client calls the same.
_S3_NAMES = {
    "endpoint_url": "endpoint",
    "region_name": "region",
    "aws_access_key_id": "access_key_id",
    "aws_secret_access_key": "secret_access_key",
    "aws_session_token": "session_token",
    "access_key": "access_key_id",
    "secret_key": "secret_access_key",
    "anon": "skip_signature",
}
_GCS_NAMES = {
    "endpoint": "base_url",
    "endpoint_url": "base_url",
    "anon": "skip_signature",
    "token": "service_account_key",
    "service_account_path": "service_account",
}
_AZURE_NAMES = {
    "account_url": "endpoint",
    "azure_storage_account_name": "account_name",
    "azure_storage_account_key": "account_key",
    "anon": "skip_signature",
}
_NAMES = {"s3": _S3_NAMES, "gcs": _GCS_NAMES, "azure": _AZURE_NAMES, "http": {}}
_CLIENT = frozenset(
    "allow_http allow_invalid_certificates connect_timeout default_content_type default_headers http1_only "
    "http2_keep_alive_interval http2_keep_alive_timeout http2_keep_alive_while_idle http2_only pool_idle_timeout "
    "pool_max_idle_per_host proxy_url proxy_ca_certificate proxy_excludes randomize_addresses read_timeout root_certificate timeout "
    "user_agent".split()
)
DEFAULT_RETRY_TIMEOUT = 300.0


@dataclass(frozen=True)
class Place(os.PathLike[str]):
    """A dataset on an object store, with what it takes to reach it; every function that takes a path takes it.

    Args:
        url: ``s3://bucket/folder``, ``r2://``, ``gs://``, ``az://`` (or ``azure://``), ``https://``, ``local:PATH``, or a path.
        storage_options: how to reach it: names of boto3's client (``endpoint_url``, ``aws_access_key_id``, ``region_name``) or of obstore
            (``endpoint``, ``access_key_id``, ``skip_signature``, ``client_options``); and ``retry_timeout``, the seconds for which requests
            are repeated while the store does not answer (300). What is not given comes from the environment, as for other tools.
        session_options: the same for boto3's session: ``profile_name``, ``region_name``.
        cache_dir: where files are kept; by default the folder of the user, see ``liveset cache path``. False keeps none.
        max_cache_size: how much may be kept there: bytes, text such as "10GB", or a part of the disk such as 0.5.

    Example:
        >>> place = liveset.Place("s3://bucket/plays", storage_options={"endpoint_url": "http://localhost:9000"})
        >>> place.url
        's3://bucket/plays'
    """

    url: str
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)
    session_options: Mapping[str, Any] | None = field(default=None, repr=False)
    cache_dir: str | os.PathLike[str] | bool | None = None
    max_cache_size: float | str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.url, str):
            raise ValueError(f"the url of a Place must be text. Found {self.url!r}.")
        for name in ("storage_options", "session_options"):
            if not isinstance(given := getattr(self, name), Mapping | None):
                # Not shown: it may hold secrets.
                raise ValueError(f"{name} must be a mapping from names to values. Found an object of the type {type(given).__name__}.")

    @classmethod
    def of(cls, path: str | os.PathLike[str], **given: Any) -> str | os.PathLike[str]:
        """Return a path together with what was given besides it; the path itself where that is nothing."""
        told = {name: value for name, value in given.items() if value is not None}
        if not told:
            return path
        return replace(path, **told) if isinstance(path, Place) else cls(os.fspath(path), **told)

    def __fspath__(self) -> str:
        return self.url

    def __repr__(self) -> str:
        shown = re.sub(r"^(https?://)[^/]*@", r"\1", self.url, flags=re.IGNORECASE)  # without a password
        return f"Place({shown!r}, cache_dir={self.cache_dir!r}, max_cache_size={self.max_cache_size!r})"

    def __str__(self) -> str:
        return self.url


@dataclass(frozen=True)
class Location:
    """One folder of a bucket, and how to reach it; picklable, and shown without its secrets."""

    kind: str
    """``s3``, ``gcs``, ``azure`` or ``http``."""
    url: str
    """As the caller wrote it, but in the one form that ``plain_url`` gives it."""
    bucket: str
    prefix: str
    """Folder in the bucket, without slashes at its ends; empty for the whole bucket."""
    config: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Options of the store, under the names of the object store client."""
    client: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Options of the HTTP client."""
    profile: str | None = None
    """A profile of the AWS configuration files."""
    credentials: Callable[[], Any] | None = field(default=None, repr=False)
    """What gives credentials that expire."""
    retry_timeout: float = DEFAULT_RETRY_TIMEOUT
    """Seconds for which requests are repeated while the store does not answer."""

    @property
    def endpoint(self) -> str:
        """Where the store answers, if that is not its provider's one address."""
        return _endpoint(self.kind, self.config)

    @property
    def server(self) -> str:
        """The bucket and where it is: what keeps conditions for all that lies in it, or for nothing."""
        return f"{self.kind} {self.bucket} {self.endpoint}"

    @property
    def place(self) -> str:
        """What tells this place from all others: the URL, and the endpoint or account."""
        return f"{self.url} at {self.endpoint}" if self.endpoint else self.url

    @lazy
    def identity(self) -> str:
        """The same for two places whose requests are the same but for their keys."""
        return repr((self.url, self.bucket_identity, self.retry_timeout))

    @lazy
    def bucket_identity(self) -> str:
        """The same for two places in one bucket that are reached in one way."""
        # Whoever has a client by this name keeps the object alive that gives credentials, so that no other one gets its number.
        provider = None if self.credentials is None else id(self.credentials)
        options = (sorted(self.config.items()), sorted(self.client.items()), self.profile, provider, self.retry_timeout)
        return repr((self.kind, self.bucket, options))

    def __getstate__(self) -> dict[str, Any]:
        # In another process the number of an object is that of another one.
        return {name: value for name, value in self.__dict__.items() if not name.endswith("identity")}

    def key(self, name: str) -> str:
        """The key of a file of the dataset."""
        return f"{self.prefix}/{name}" if self.prefix else name


def plain_url(url: str) -> str:
    """Return the one form of the URL of a folder: its keys have no empty names, however many slashes there are."""
    scheme, _, rest = url.partition("://")
    return f"{scheme.lower()}://{re.sub('/+', '/', rest).removesuffix('/')}"


def parse_location(url: str, options: Mapping[str, Any] | None = None, session: Mapping[str, Any] | None = None) -> Location:
    """Return the place that a URL names.

    Args:
        url: ``s3://bucket/folder``, ``r2://``, ``gs://``, ``az://`` (or ``azure://``), ``https://``.
        options: how to reach it, under the names of boto3's client (``endpoint_url``, ``aws_access_key_id``) or of obstore (``endpoint``,
            ``access_key_id``, ``client_options``); besides these ``retry_timeout``, seconds.
        session: the same for boto3's session (``profile_name``, ``region_name``).

    Raises:
        ValueError: the URL or an option is not understood.
    """
    scheme = url.partition("://")[0].lower()
    if scheme not in _KINDS:
        raise ValueError(f"{url!r}: {scheme}:// is not supported. Use a path, s3://, r2://, gs://, az://, https:// or local:PATH.")
    kind, url = _KINDS[scheme], plain_url(url)
    rest = url.partition("://")[2]
    bucket, _, folder = rest.partition("/")
    if re.search(r"\?.*sig(nature)?=", rest, re.IGNORECASE):
        raise ValueError(
            f"{url.partition('?')[0]!r} goes on with a signature: pass it in storage_options, for Azure as "
            '{"sas_token": "..."}. In names on a web server, ? is written as %3F.'
        )
    login = ""
    if kind == "http" and "@" in bucket:
        login, _, bucket = bucket.rpartition("@")
        rest = rest.removeprefix(f"{login}@")
        url = f"{scheme}://{rest}"
    if not bucket:
        raise ValueError(f"{url!r} names no bucket: it should be {scheme}://bucket/folder.")
    given = {**(session or {}), **(options or {})}
    if kind == "azure" and "@" in bucket:  # abfs://container@account.dfs.core.windows.net/folder
        bucket, _, host = bucket.partition("@")
        given.setdefault("account_name", host.partition(".")[0])
    if kind == "http":
        if "?" in rest or "#" in rest:
            shown = re.split(r"[?#]", url)[0]  # what follows may be a secret
            raise ValueError(f"{shown!r} with a query is not the URL of a folder: in names, ? is written as %3F and # as %23.")
        folder = unquote(folder)
    # Other keys than those of URLs: every character stands for itself.
    names = [name for name in folder.split("/") if name]
    if "." in names or ".." in names:
        raise ValueError(f"{url!r}: an object store has no folders named '.' or '..'.")
    prefix = "/".join(names)
    client = dict(given.pop("client_options", None) or {})
    timeout = given.pop("retry_timeout", DEFAULT_RETRY_TIMEOUT)
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or timeout < 0:
        raise ValueError(f"retry_timeout must be a number of seconds. Found {timeout!r}.")
    # What the environment says is asked once: a client outlives it, and another process may have another one.
    profile = given.pop("profile_name", None) or (os.environ.get("AWS_PROFILE") if kind == "s3" else None)
    credentials = given.pop("credential_provider", None)
    config: dict[str, Any] = {}
    for name, value in given.items():
        plain = _NAMES[kind].get(name, name.removeprefix("aws_") if kind == "s3" else name.removeprefix("azure_storage_"))
        if value is None:
            continue
        if name in _CLIENT:
            client[name] = value
        elif name == "verify":
            client.update({"allow_invalid_certificates": True} if value is False else _authority(value))
        elif name == "config" and kind == "s3":
            config.update(_of_botocore(value))
        elif name == "use_ssl":
            client.setdefault("allow_http", not value)
        elif kind == "azure" and name == "credential":
            config.update(_azure_credential(value, url))
        else:
            config[plain] = value
    if kind == "http":
        client.setdefault("allow_http", scheme == "http")
        if login:  # not in the URL, which is shown
            user, _, password = login.partition(":")
            basic = base64.b64encode(f"{unquote(user)}:{unquote(password)}".encode()).decode()
            client["default_headers"] = {"Authorization": f"Basic {basic}", **(client.get("default_headers") or {})}
        return Location(kind, url, f"{scheme}://{bucket}", prefix, {}, client, retry_timeout=float(timeout))
    _add_environment(kind, config)
    if scheme == "r2":
        account = config.pop("account_id", None)
        if account is not None:
            config.setdefault("endpoint", f"https://{account}.r2.cloudflarestorage.com")
        if not _endpoint(kind, config):
            raise ValueError(f'{url!r} needs the account: storage_options={{"account_id": "..."}}, or "endpoint_url".')
        config.setdefault("region", "auto")
    endpoint = _endpoint(kind, config)
    for address in (config.get("endpoint"), config.get("base_url")):
        if address is not None and not str(address).startswith(("http://", "https://")):
            raise ValueError(f"the endpoint of {url} needs http:// or https:// in front. Found {address!r}.")
    if endpoint.startswith("http://"):
        client.setdefault("allow_http", True)
    if kind == "s3" and endpoint:
        # Servers under an address of their own rarely have names for their buckets.
        config.setdefault("virtual_hosted_style_request", False)
        config.setdefault("region", "us-east-1")
    return Location(kind, url, bucket, prefix, config, client, profile, credentials, retry_timeout=float(timeout))


def _endpoint(kind: str, config: Mapping[str, Any]) -> str:
    if kind == "s3":
        return str(config.get("endpoint") or "")
    if kind == "azure":
        return str(config.get("endpoint") or config.get("account_name") or "")
    if kind == "gcs":
        told = re.search(r'"gcs_base_url"\s*:\s*"([^"]+)"', str(config.get("service_account_key", "")))
        return str(config.get("base_url") or (told.group(1) if told else ""))
    return ""


_ENVIRONMENT: dict[str, dict[str, tuple[str, ...]]] = {
    "s3": {
        "endpoint": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
        "region": ("AWS_REGION", "AWS_DEFAULT_REGION"),
    },
    "azure": {
        "endpoint": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
        "account_name": ("AZURE_STORAGE_ACCOUNT_NAME",),
    },
    "gcs": {"base_url": ("GOOGLE_BASE_URL",)},
}
"""Variables that say where a store is, the one that counts first."""


def _add_environment(kind: str, config: dict[str, Any]) -> None:
    for option, names in _ENVIRONMENT[kind].items():
        found = next((os.environ[name] for name in names if os.environ.get(name)), None)
        if found is not None:
            config.setdefault(option, found)


def _authority(verify: Any) -> dict[str, Any]:
    if verify is True:
        return {}
    with open(verify, "rb") as file:
        return {"root_certificate": file.read()}


def _of_botocore(config: Any) -> dict[str, Any]:
    """Return what a ``botocore.config.Config`` says about addresses and signatures."""
    found: dict[str, Any] = {}
    style = (getattr(config, "s3", None) or {}).get("addressing_style")
    if style in ("path", "virtual"):
        found["virtual_hosted_style_request"] = style == "virtual"
    if getattr(config, "region_name", None):
        found["region"] = config.region_name
    if "UNSIGNED" in repr(getattr(config, "signature_version", None)).upper():
        found["skip_signature"] = True
    return found


def _azure_credential(value: Any, url: str) -> dict[str, Any]:
    if isinstance(value, str):
        return {"sas_token": value} if "sig=" in value else {"account_key": value}
    raise ValueError(f"{url!r}: credential= must be an account key or a SAS token; pass other kinds as credential_provider=.")


def profile_credentials(location: Location) -> Callable[[], Any] | None:
    """Return what reads the credentials of an AWS profile and renews them, or None where none is asked for.

    Raises:
        MissingDependency: a profile is asked for, and boto3 is not installed.
    """
    if location.credentials is not None:
        return location.credentials
    if location.kind != "s3" or location.config.get("skip_signature") or "access_key_id" in location.config:
        return None
    profile = location.profile
    if profile is None and ("AWS_ACCESS_KEY_ID" in os.environ or not _has_aws_files()):
        return None
    try:
        import boto3
        from botocore.exceptions import ProfileNotFound
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError as error:
        if profile is None:
            return None
        raise MissingDependency(f"The AWS profile {profile!r} is read with boto3: pip install boto3", package="boto3") from error
    try:
        session = boto3.Session(profile_name=profile)
    except ProfileNotFound as error:
        raise ValueError(f"{location.url}: {error}.") from error
    if session.get_credentials() is None:
        return None
    return Boto3CredentialProvider(session)


def _has_aws_files() -> bool:
    names = (os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"), os.environ.get("AWS_CONFIG_FILE", "~/.aws/config"))
    return any(os.path.isfile(os.path.expanduser(name)) for name in names)
