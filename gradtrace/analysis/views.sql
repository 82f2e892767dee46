-- The views that people and commands ask, over `records`, `module_table` and `meta_table`.

CREATE VIEW params AS SELECT * FROM records WHERE tensor = 'param';

CREATE VIEW grads AS SELECT * FROM records WHERE tensor = 'grad';

CREATE VIEW events AS
SELECT rank, step, micro_step, seq, time, tensor AS event, module, detail
FROM records
WHERE phase = 'event';

CREATE VIEW modules AS SELECT * FROM module_table;

CREATE VIEW meta AS SELECT * FROM meta_table;

-- A scalar's value: its finite one, else the non-finite one that it is.
CREATE MACRO scalar_value(nans, posinfs, neginfs, finite) AS
CASE
    WHEN nans > 0 THEN 'nan'::DOUBLE
    WHEN posinfs > 0 THEN 'inf'::DOUBLE
    WHEN neginfs > 0 THEN '-inf'::DOUBLE
    ELSE finite
END;

-- The norm of all gradients, as clip_grad_norm_ would see it: nan or inf as soon as one element is. A watched step has
-- it in a row of its own.
CREATE VIEW steps AS
WITH last_grads AS (
    SELECT rank, step, module, path, arg_max(norm, seq) AS norm
    FROM (
        SELECT rank, step, module, path, seq,
            scalar_value(nan_count, posinf_count + neginf_count, 0, norm) AS norm
        FROM records
        WHERE tensor = 'grad'
    )
    GROUP BY rank, step, module, path
),
grad_norms AS (
    SELECT rank, step, sqrt(sum(norm * norm)) AS grad_norm
    FROM last_grads
    GROUP BY rank, step
),
scalars AS (
    SELECT
        rank,
        step,
        arg_max(value, seq) FILTER (WHERE tensor = 'grad_norm') AS grad_norm,
        arg_max(value, seq) FILTER (WHERE tensor = 'loss') AS loss,
        arg_min(value, seq) FILTER (WHERE tensor = 'lr') AS lr,
        arg_max(value, seq) FILTER (WHERE tensor = 'loss_scale') AS loss_scale
    FROM (
        SELECT rank, step, seq, tensor, scalar_value(nan_count, posinf_count, neginf_count, max) AS value
        FROM records
        WHERE tensor IN ('loss', 'lr', 'loss_scale', 'grad_norm')
    )
    GROUP BY rank, step
),
counts AS (
    SELECT
        rank,
        step,
        max(time) AS time,
        -- An evaluation between two passes is no pass of the step.
        coalesce(max(micro_step) FILTER (WHERE phase <> 'evaluation'), 0) + 1 AS micro_steps,
        count(*) FILTER (WHERE phase <> 'event') AS records,
        count(*) FILTER (WHERE nan_count > 0) AS nan_records,
        count(*) FILTER (WHERE posinf_count > 0) AS posinf_records,
        count(*) FILTER (WHERE neginf_count > 0) AS neginf_records,
        count(*) FILTER (WHERE phase = 'event' AND tensor = 'skip') > 0 AS skipped,
        -- A watched step has a norm of its gradients; one without a backward pass has nothing of these either.
        count(*) FILTER (WHERE tensor IN ('input', 'grad_output', 'grad')) > 0
        AND count(*) FILTER (WHERE tensor = 'grad_norm') = 0 AS in_full
    FROM records
    -- Records are of boundaries; rows of single operations (replay, op-level capture) are not counted.
    WHERE op IS NULL
    GROUP BY rank, step
)
SELECT
    counts.rank,
    counts.step,
    counts.time,
    CASE WHEN counts.in_full THEN 'full' ELSE 'watched' END AS level,
    counts.micro_steps::INTEGER AS micro_steps,
    counts.records,
    counts.nan_records,
    counts.posinf_records,
    counts.neginf_records,
    scalars.loss,
    coalesce(scalars.grad_norm, grad_norms.grad_norm) AS grad_norm,
    scalars.lr,
    scalars.loss_scale,
    counts.skipped
FROM counts
LEFT JOIN scalars USING (rank, step)
LEFT JOIN grad_norms USING (rank, step)
ORDER BY counts.step, counts.rank;
