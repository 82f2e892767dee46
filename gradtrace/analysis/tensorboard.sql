-- The scalars of some steps, a row each, in order of step and rank. Parameters: $first and $last step, $steps of these that
-- are wanted, $bad modules that get a count of non-finite elements.
-- TensorBoard sorts the sections of its page by name and opens the first two: global comes first.
-- Norms and magnitudes are what torch would return: nan or inf as soon as one element is. max() takes nan for the largest.

WITH wanted AS MATERIALIZED (
    SELECT
        rank, step, seq, phase, module, tensor, path,
        scalar_value(nan_count, posinf_count + neginf_count, 0, norm) AS norm,
        scalar_value(nan_count, posinf_count + neginf_count, 0, greatest(abs("min"), abs("max"))) AS magnitude,
        scalar_value(nan_count, posinf_count, neginf_count, "max") AS value,
        nan_count + posinf_count + neginf_count AS nonfinite
    FROM records
    WHERE step BETWEEN $first AND $last
        AND step IN (SELECT unnest($steps::BIGINT[]))
        AND op IS NULL AND phase NOT IN ('replay', 'event') AND tensor <> 'grad_norm'
),
outputs AS (
    SELECT
        rank, step,
        CASE phase WHEN 'evaluation' THEN '_evaluation/' ELSE '/' END || label(module) AS place,
        max(norm) AS norm,
        max(magnitude) AS magnitude
    FROM wanted
    WHERE tensor = 'output' AND phase IN ('forward', 'evaluation') AND module IS NOT NULL
    GROUP BY ALL
),
-- What counts is the last of a step: a gradient once all passes have added to it, a parameter after its update.
latest AS (
    SELECT rank, step, module, tensor, path, arg_max(norm, seq) AS norm
    FROM wanted
    WHERE tensor IN ('grad', 'param') AND module IS NOT NULL
    GROUP BY ALL
),
scalars AS (
    SELECT rank, step, 'global/loss' AS tag, loss AS value FROM steps WHERE step BETWEEN $first AND $last
    UNION ALL
    SELECT rank, step, 'global/grad_norm', grad_norm FROM steps WHERE step BETWEEN $first AND $last
    UNION ALL
    SELECT rank, step, 'global/loss_scale', loss_scale FROM steps WHERE step BETWEEN $first AND $last
    UNION ALL
    SELECT rank, step, 'global/lr/' || path, arg_max(value, seq) FROM wanted WHERE tensor = 'lr' GROUP BY ALL
    UNION ALL
    SELECT rank, step, 'global/nonfinite', sum(nonfinite) FROM wanted GROUP BY ALL
    UNION ALL
    SELECT rank, step, 'output_norm' || place, norm FROM outputs
    UNION ALL
    SELECT rank, step, 'output_max' || place, magnitude FROM outputs
    UNION ALL
    SELECT rank, step, tensor || '_norm/' || label(module), sqrt(sum(norm * norm))
    FROM latest
    GROUP BY ALL
    UNION ALL
    SELECT rank, step, 'nonfinite/' || label(module), sum(nonfinite)
    FROM wanted
    WHERE module IN (SELECT unnest($bad::VARCHAR[]))
    GROUP BY ALL
),
times AS (
    SELECT rank, step, coalesce(epoch(max(time)), 0) AS time
    FROM records
    WHERE step BETWEEN $first AND $last AND step IN (SELECT unnest($steps::BIGINT[]))
    GROUP BY rank, step
)
SELECT rank, step, time, tag, value::DOUBLE
FROM scalars JOIN times USING (rank, step)
WHERE value IS NOT NULL
ORDER BY step, rank, tag;
