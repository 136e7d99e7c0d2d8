"""A user's script, as a process of its own: python -m tests.agl_core.execution.script '<json>'."""

import json
import logging
import sys
from typing import Any

from agl_core import LightningStoreClient, Trainer
from tests.agl_core.execution import work


def main(options: dict[str, Any]) -> None:
    logging.basicConfig(level="INFO")
    algorithm = {"enqueues": work.Enqueues(work.RETRIED), "waits": work.WaitsForEver()}
    store = options.get("store")
    trainer = Trainer(
        strategy=options["strategy"],
        algorithm=algorithm.get(options.get("algorithm", "")),
        store=LightningStoreClient(store, retry_delays=[1.0] * 60) if store else None,
    )
    trainer.fit(getattr(work, options["agent"]), options.get("rows"))
    sys.stdout.write("done\n")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
