import pytest

from agl_core.utils.shown_url import without_credentials


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://me:hunter2@host:4200/api", "http://host:4200/api"),
        ("https://hunter2@host/a@b", "https://host/a@b"),
        ("http://host/a@b", "http://host/a@b"),
        (None, "None"),
    ],
)
def test_a_url_is_shown_without_its_user_and_password(url: object, shown: str):
    assert without_credentials(url) == shown
