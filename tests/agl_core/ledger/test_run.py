from pathlib import Path

import pytest

from agl_core.errors import ConfigError
from agl_core.ledger.run import open_run


@pytest.mark.parametrize("run_id", ["", "..", "../other", "a/b", "Upper", "line\n"])
def test_an_id_that_no_run_has_is_refused(tmp_path: Path, run_id: str):
    with pytest.raises(ConfigError, match="use lowercase letters, digits and dashes"):
        open_run(str(tmp_path), run_id)
