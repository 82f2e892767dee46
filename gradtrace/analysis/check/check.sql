-- What the rules of `rules/` ask: the boundaries in the chosen steps and ranks, and two small tables made of them.

CREATE TEMP VIEW seen AS
SELECT *, greatest(abs("min"), abs("max")) AS extreme
FROM records
WHERE op IS NULL
    AND phase NOT IN ('replay', 'event')
    AND step >= getvariable('first_step')
    AND step < getvariable('end_step')
    AND (getvariable('only_rank') IS NULL OR rank = getvariable('only_rank'));

CREATE TEMP TABLE scales AS
SELECT rank, step, arg_max("max", seq) AS loss_scale
FROM seen
WHERE tensor = 'loss_scale'
GROUP BY rank, step;

-- A module's gradients: the norm of all its parameters' together, as they arrived in the last pass of the step, the
-- loss scale taken out; nan or inf as soon as one element is.
CREATE TEMP TABLE module_grads AS
SELECT of_steps.* REPLACE (norm / coalesce(loss_scale, 1) AS norm)
FROM (
    SELECT rank, step, module, arg_max(norm, micro_step) AS norm, arg_max(numel, micro_step) AS numel
    FROM (
        SELECT
            rank, step, micro_step, module, sum(numel) AS numel,
            sqrt(sum(pow(scalar_value(nan_count, posinf_count + neginf_count, 0, norm), 2))) AS norm
        FROM seen
        WHERE tensor = 'grad' AND phase = 'backward'
        GROUP BY rank, step, micro_step, module
    )
    GROUP BY rank, step, module
) AS of_steps
LEFT JOIN scales USING (rank, step);

-- The course of the run, a row a step. Loss and norm have the loss scale taken out; lr is that of the fastest group.
-- Where gradients accumulate, a full step has the norm of one pass and a watched step that of their sum: rules compare
-- norms within a `series` only.
CREATE TEMP TABLE course AS
WITH scalars AS (
    SELECT
        rank,
        step,
        arg_max(value, seq) FILTER (WHERE tensor = 'loss') AS loss,
        arg_max(value, seq) FILTER (WHERE tensor = 'grad_norm') AS grad_norm,
        max(value) FILTER (WHERE tensor = 'lr') AS lr
    FROM (
        SELECT rank, step, seq, tensor, scalar_value(nan_count, posinf_count, neginf_count, "max") AS value
        FROM seen
        WHERE tensor IN ('loss', 'lr', 'grad_norm')
    )
    GROUP BY rank, step
),
levels AS (
    SELECT
        rank, step, max(micro_step) FILTER (WHERE phase = 'backward') AS last_pass,
        -- As in the view `steps`: a watched step has a norm of its gradients, and nothing of these.
        bool_or(tensor IN ('input', 'grad_output', 'grad')) AND NOT bool_or(tensor = 'grad_norm') AS in_full
    FROM seen
    GROUP BY rank, step
),
grad_norms AS (
    SELECT rank, step, sqrt(sum(norm * norm)) AS grad_norm FROM module_grads GROUP BY rank, step
),
skips AS (
    SELECT DISTINCT rank, step FROM events WHERE event = 'skip'
)
SELECT
    rank,
    step,
    in_full,
    in_full OR coalesce(max(last_pass) OVER (PARTITION BY rank), 0) = 0 AS series,
    loss / coalesce(loss_scale, 1) AS loss,
    coalesce(scalars.grad_norm / coalesce(loss_scale, 1), grad_norms.grad_norm) AS grad_norm,
    lr,
    loss_scale,
    skips.step IS NOT NULL AS skipped
FROM levels
LEFT JOIN scalars USING (rank, step)
LEFT JOIN grad_norms USING (rank, step)
LEFT JOIN scales USING (rank, step)
LEFT JOIN skips USING (rank, step)
ORDER BY rank, step;
