"""Resources: one version of each id, the newest; the latest is what was published last."""

from agl_core.errors import StoreError
from agl_core.store.answer_table import new_id
from agl_core.store.database import Transaction
from agl_core.store.json_text import encode_records
from agl_core.store.schema import to_resources
from agl_core.types.resources import NamedResources, ResourcesUpdate


def add(transaction: Transaction, resources: NamedResources) -> ResourcesUpdate:
    """Keep resources under a new id."""
    return publish(transaction, new_id("rs", 6), resources)


def publish(
    transaction: Transaction, resources_id: str, resources: NamedResources
) -> ResourcesUpdate:
    """Keep resources as the next version of an id, which may be new."""
    transaction.run(
        "INSERT INTO resources"
        " VALUES (?, (SELECT coalesce(max(publication), 0) + 1 FROM resources), 1, ?, ?, ?)"
        " ON CONFLICT (resources_id) DO UPDATE SET publication = excluded.publication,"
        " version = version + 1, update_time = excluded.update_time,"
        " resources = excluded.resources",
        resources_id,
        transaction.now,
        transaction.now,
        encode_records(resources),
    )
    return require(transaction, resources_id)


def find(transaction: Transaction, resources_id: str) -> ResourcesUpdate | None:
    """Return the newest version of an id, or None."""
    row = transaction.one("SELECT * FROM resources WHERE resources_id = ?", resources_id)
    return None if row is None else to_resources(row)


def require(transaction: Transaction, resources_id: str) -> ResourcesUpdate:
    """Return the newest version of an id.

    Raises:
        StoreError: Resources not found.
    """
    found = find(transaction, resources_id)
    if found is None:
        raise StoreError(f"Resources {resources_id} not found; add_resources comes first")
    return found


def latest_id(transaction: Transaction) -> str | None:
    """Return the id of what was published last, or None."""
    return transaction.value("SELECT resources_id FROM resources ORDER BY publication DESC LIMIT 1")
