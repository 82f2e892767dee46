-- gradient-spike: The gradients' norm jumps
-- severity: warning
-- meaning: In one step the gradients are many times as large as in the steps before, and larger than at the start of
--   the run. One batch like that can undo much of the training; it is often the first sign of data that is out of
--   range, of a division by almost nothing, or of a learning rate at the edge.
-- mend: Look at the batch of that step; clip the norm of the gradients.
-- value: the norm of all gradients
-- looks at: the gradients as they arrive, before they are clipped, with the loss scale taken out, in full and in
--   watched steps; the module named, in full steps, is the one with the largest norm. Skipped steps are passed over.
--   With accumulation it is the last pass of a step.
-- needs: history + 1
-- threshold factor = 20 times: against the median norm of the 20 steps before
-- source factor: our choice: a factor of ten from batch to batch is common with small batches
-- threshold history = 5 steps: so many steps must have come before
-- source history: our choice: a median of fewer says little
WITH usual AS (
    SELECT
        rank, step, grad_norm,
        row_number() OVER so_far AS number,
        median(grad_norm) OVER (so_far ROWS BETWEEN 20 PRECEDING AND 1 PRECEDING) AS usual,
        lag(grad_norm) OVER so_far AS previous,
        series
    FROM course
    WHERE isfinite(grad_norm) AND NOT skipped
    WINDOW so_far AS (PARTITION BY rank, series ORDER BY step)
),
starts AS (
    SELECT rank, series, median(grad_norm) AS start FROM usual WHERE number <= $history GROUP BY rank, series
)
SELECT
    rank,
    (SELECT arg_max(module, m.norm) FROM module_grads AS m WHERE m.rank = usual.rank AND m.step = usual.step) AS module,
    'grad' AS tensor, NULL AS path, step AS since, step, grad_norm AS value, $factor * usual AS threshold,
    format('{:.3g} times the median of the steps before', grad_norm / usual) AS note
FROM usual JOIN starts USING (rank, series)
WHERE number > $history AND usual > 0 AND grad_norm >= $factor * usual AND previous < $factor * usual
    AND grad_norm > start
