"""Schemas of the ledger's Parquet tables, each with a version in the file's metadata.

A reader of version n reads n and n - 1. Token ids are `list<int32>`, log-probs `list<float32>`,
times UTC epoch seconds. One rollout through the tables, by its `index` (its place among the
requests)::

    requests  index=7 dataset=train row=31 group=3 sample=1
    outcomes  index=7 attempt=1 kind=succeeded reward=1.0
    spans     index=7 call_index=0 prompt_token_ids=[5, 9] response_token_ids=[12, 2]
              logprobs=[-0.1, -0.7]
    triplets  index=7 call_index=0 prompt_ids=[5, 9] response_ids=[12, 2] reward=1.0
    batch     index=7 call_index=0 response_mask=[1, 1] token_rewards=[0, 1] drop_reason=null
    updates   row -> old_log_probs, advantages (one value for each response token)
"""

import pyarrow as pa

SCHEMA_NAME = b"agl.schema"
SCHEMA_VERSION = b"agl.schema_version"

TOKEN_IDS = pa.list_(pa.int32())
LOGPROBS = pa.list_(pa.float32())


def _schema(name: str, version: int, fields: list[tuple[str, pa.DataType]]) -> pa.Schema:
    metadata = {SCHEMA_NAME: name.encode(), SCHEMA_VERSION: str(version).encode()}
    return pa.schema(fields, metadata=metadata)


def column(table: pa.Table, name: str, schema: pa.Schema) -> pa.ChunkedArray:
    """Return a column of a table; nulls where the table's version of the schema has none."""
    if name in table.column_names:
        return table[name]
    return pa.chunked_array([pa.nulls(len(table), schema.field(name).type)])


DATASET = _schema("dataset", 1, [("row", pa.int32()), ("input", pa.string())])
"""A dataset's rows; `input` is the row as JSON."""

REQUESTS = _schema(
    "requests",
    1,
    [
        ("index", pa.int32()),
        ("rollout_id", pa.string()),
        ("dataset", pa.string()),
        ("row", pa.int32()),
        ("group", pa.int32()),
        ("sample", pa.int32()),
        ("mode", pa.string()),
        ("seed", pa.int64()),
        ("input", pa.string()),  # the dataset row as JSON
    ],
)

OUTCOMES = _schema(
    "outcomes",
    1,
    [
        ("index", pa.int32()),
        ("rollout_id", pa.string()),
        ("attempt_id", pa.string()),
        ("attempt", pa.int32()),
        ("kind", pa.string()),
        ("reward", pa.float64()),
        ("message", pa.string()),
        ("traceback", pa.string()),
        ("started", pa.float64()),
        ("duration_seconds", pa.float64()),
        ("num_calls", pa.int32()),
        ("prompt_tokens", pa.int64()),
        ("completion_tokens", pa.int64()),
        ("annotations", pa.string()),  # numbers that the agent noted, as a JSON object
        ("final", pa.bool_()),  # the attempt that decides its rollout
    ],
)

SPANS = _schema(
    "spans",
    2,
    [
        ("index", pa.int32()),
        ("rollout_id", pa.string()),
        ("attempt_id", pa.string()),
        ("sequence_id", pa.int32()),
        ("trace_id", pa.binary(16)),
        ("span_id", pa.binary(8)),
        ("parent_id", pa.binary(8)),
        ("name", pa.string()),
        ("status", pa.string()),
        ("status_description", pa.string()),
        ("start_time", pa.float64()),
        ("end_time", pa.float64()),
        ("operation", pa.string()),
        ("model", pa.string()),
        ("policy_version", pa.string()),
        ("weights_digest", pa.string()),
        ("call_index", pa.int32()),
        ("temperature", pa.float64()),
        ("sampling", pa.string()),  # `semconv.SAMPLING`; from version 2 on, like the next
        ("max_tokens", pa.int64()),
        ("finish_reason", pa.string()),
        ("response_id", pa.string()),
        ("input_tokens", pa.int64()),
        ("output_tokens", pa.int64()),
        ("reward", pa.float64()),
        ("prompt_token_ids", TOKEN_IDS),
        ("response_token_ids", TOKEN_IDS),
        ("logprobs", LOGPROBS),
        ("attributes", pa.string()),  # every other attribute, as JSON
        ("events", pa.string()),  # as JSON
    ],
)

REWARDS = pa.list_(
    pa.struct(
        [
            ("name", pa.string()),  # of the dimension
            ("value", pa.float64()),
            ("primary", pa.bool_()),  # the dimension that counts where none are weighted
            ("final", pa.bool_()),  # part of the reward that was emitted last
            ("matched", pa.bool_()),  # of this call; else of no call, kept on the first one
        ]
    )
)
"""Rewards that an agent emitted, an entry for each dimension, in the order of their spans."""

TRIPLETS = _schema(
    "triplets",
    3,
    [
        ("index", pa.int32()),
        ("rollout_id", pa.string()),
        ("group", pa.int32()),
        ("call_index", pa.int32()),
        ("span_id", pa.binary(8)),
        ("prompt_ids", TOKEN_IDS),
        ("response_ids", TOKEN_IDS),
        ("logprobs", LOGPROBS),
        ("reward", pa.float64()),  # the rollout's final one
        ("rewards", REWARDS),
        ("policy_version", pa.string()),
        ("temperature", pa.float64()),
        ("sampling", pa.string()),  # `semconv.SAMPLING`; from version 3 on, like the next
        ("max_tokens", pa.int64()),
        ("finish_reason", pa.string()),
        ("output_tokens", pa.int64()),  # by the server's count; from version 3 on
    ],
)
"""A call that sampled tokens and has no ids is here too, with nulls: no row is built of it."""

BATCH_ROWS = _schema(
    "batch_rows",
    2,
    [
        ("row", pa.int32()),
        ("index", pa.int32()),
        ("rollout_id", pa.string()),
        ("group", pa.int32()),
        ("call_index", pa.int32()),  # of the row's first call
        ("step", pa.int32()),  # place of the row in its rollout, from 0
        ("num_calls", pa.int32()),
        ("prompt_ids", TOKEN_IDS),
        # Five lists of one length, an entry for each token of the response:
        ("response_ids", TOKEN_IDS),
        ("response_mask", pa.list_(pa.int8())),  # 1 where the token was sampled and has loss weight
        ("rollout_logprobs", LOGPROBS),  # 0 where the token was not sampled
        ("policy_versions", pa.list_(pa.dictionary(pa.int32(), pa.string()))),  # null: not sampled
        ("token_rewards", pa.list_(pa.float32())),  # of a call, on the last token it sampled
        ("reward", pa.float64()),  # sum of the token rewards before they were rounded
        ("rollout_reward", pa.float64()),  # the rollout's one value for group statistics
        ("truncated", pa.string()),  # what was cut: `prompt_left`, `prompt_left,response_right`
        ("drop_reason", pa.string()),  # null where the row is in the batch
    ],
)

BREAKS = _schema(
    "breaks",
    1,
    [
        ("row", pa.int32()),  # that the call starts
        ("index", pa.int32()),
        ("rollout_id", pa.string()),
        ("call_index", pa.int32()),
        ("kind", pa.string()),
        ("position", pa.int32()),  # of the first token that differs; null where none does
        ("expected_id", pa.int32()),
        ("found_id", pa.int32()),
    ],
)
"""Calls that start a row though their rollout has one; see `agl_core.trajectory.breaks`."""

UPDATE_ROWS = _schema(
    "update_rows",
    2,
    [
        ("row", pa.int32()),
        ("old_log_probs", LOGPROBS),
        ("advantages", LOGPROBS),
        ("drop_reason", pa.string()),  # null where the row reached the loss
    ],
)

UPDATE_METRICS = _schema(
    "update_metrics",
    1,
    [
        ("step", pa.int32()),  # optimizer step within the iteration
        ("name", pa.string()),
        ("value", pa.float64()),
    ],
)
