"""URLs as messages, logs and records of failures may show them."""

import re

_USER = re.compile(r"://[^/@\s]*@")


def without_credentials(url: object) -> str:
    """Return a URL without its user and password."""
    return _USER.sub("://", str(url))
