"""Draw a run's curves into its ledger."""

from agl_core.ledger import files
from agl_core.ledger.run import RunLedger
from agl_core.plot import reward_plot
from tasks.policies import ledger_task


@ledger_task(name="plot")
def plot(ledger: RunLedger) -> str:
    """Write the reward plot of a run that is done and return its key; a plot that is there
    stays.
    """
    if not ledger.storage.exists(ledger.plot_key):
        picture = reward_plot(ledger.manifests(), title=f"run {ledger.run_id}")
        files.put_bytes(ledger.storage, ledger.plot_key, picture)
    return ledger.plot_key
