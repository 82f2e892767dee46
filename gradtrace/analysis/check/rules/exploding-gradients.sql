-- exploding-gradients: Gradients explode
-- severity: serious
-- meaning: The norm of all gradients has grown without a pause, far above what it had been so far. Recurrent and deep
--   models multiply a gradient by much the same factor layer after layer; a rate of learning that is too high does
--   the same step after step. Growth is counted from the step after the last one that was at or below the median.
-- mend: Lower the learning rate or warm it up, clip the norm of the gradients, look at the scale of the initial
--   weights.
-- value: the norm of the gradients, of all or of one module
-- looks at: the gradients as they arrive, before they are clipped, with the loss scale taken out, in full and in
--   watched steps; which modules it was is told of full steps only. Skipped steps and gradients that are not finite
--   are passed over. With accumulation it is the last pass of a step.
-- needs: history + 1
-- threshold factor = 100 times: against the median norm of all steps before (at most 1,000)
-- source factor: our choice: norms vary tenfold from batch to batch and over a healthy run; Pascanu, Mikolov and
--   Bengio, "On the difficulty of training recurrent neural networks" (2013) describe the failure and have clipping
--   against it
-- threshold steps = 3 steps: so long the growth must have lasted; what is faster is a spike
-- source steps: our choice, so that one odd batch is no explosion
-- threshold history = 5 steps: so many steps must have come before
-- source history: our choice: a median of fewer says little
WITH usual AS (
    SELECT
        rank, series, step, grad_norm,
        row_number() OVER so_far AS number,
        median(grad_norm) OVER (so_far ROWS BETWEEN 1000 PRECEDING AND 1 PRECEDING) AS usual
    FROM course
    WHERE isfinite(grad_norm) AND NOT skipped
    WINDOW so_far AS (PARTITION BY rank, series ORDER BY step)
),
crossings AS (
    SELECT
        *,
        1 + max(CASE WHEN usual IS NULL OR grad_norm <= usual THEN number END)
            OVER (PARTITION BY rank, series ORDER BY step) AS first_number
    FROM usual
),
first_crossings AS (
    FROM crossings
    WHERE usual > 0 AND grad_norm >= $factor * usual AND number > $history AND number - first_number + 1 >= $steps
    QUALIFY row_number() OVER (PARTITION BY rank, series ORDER BY step) = 1
),
growths AS (
    SELECT found.*, usual.step AS since
    FROM first_crossings AS found
    JOIN usual ON usual.rank = found.rank AND usual.series = found.series AND usual.number = found.first_number
),
of_modules AS (
    SELECT rank, module, g.since, g.step, median(m.norm) AS usual
    FROM module_grads AS m JOIN growths AS g USING (rank)
    WHERE m.step < g.since AND isfinite(m.norm)
    GROUP BY ALL
)
SELECT
    rank, NULL AS module, 'grad' AS tensor, NULL AS path, since, step, grad_norm AS value, $factor * usual AS threshold,
    format('all together: {:.3g} times their median, in {} steps', grad_norm / usual, number - first_number + 1) AS note
FROM growths
UNION ALL
SELECT
    rank, module, 'grad', NULL, since, step, m.norm, $factor * usual,
    format('{:.3g} times its median before step {}', m.norm / usual, since)
FROM of_modules JOIN module_grads AS m USING (rank, module, step)
WHERE isfinite(m.norm) AND usual > 0 AND m.norm >= $factor * usual
