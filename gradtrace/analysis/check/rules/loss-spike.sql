-- loss-spike: The loss jumps
-- severity: warning
-- meaning: The loss lies far above the steps before: more than its scatter explains, at least twice its usual size,
--   and by a part of what it was at the start. Runs recover from some spikes and are lost to others; the batch and
--   the gradients of that step say which.
-- mend: Look at the batch; clip gradients, lower the learning rate, or go back to a checkpoint and leave out the
--   batches of the spike, as was done for PaLM (Chowdhery and others, 2022).
-- value: the loss
-- looks at: the last loss of each step that was handed to backward(), with the loss scale taken out, in full and in
--   watched steps; evaluation has no such loss. Losses that are not finite are first-nan's.
-- needs: history + 1
-- threshold scatter = 10 times: the median distance from the median in the 20 steps before, in units of a standard
--   deviation (1.4826 times it)
-- source scatter: our choice: losses have heavy tails
-- threshold factor = 2 times: the median of the 20 steps before
-- source factor: our choice, so that a loss that hardly varies may
-- threshold part = 0.1 times: the median of the first steps, by which it must at least rise
-- source part: our choice, so that a loss that has come down to nothing may vary
-- threshold history = 5 steps: so many steps must have come before
-- source history: our choice: a median of fewer says little
WITH usual AS (
    SELECT
        rank, step, loss, row_number() OVER by_step AS number,
        median(loss) OVER before AS usual,
        mad(loss) OVER before AS scatter
    FROM course
    WHERE isfinite(loss)
    WINDOW
        by_step AS (PARTITION BY rank ORDER BY step),
        before AS (PARTITION BY rank ORDER BY step ROWS BETWEEN 20 PRECEDING AND 1 PRECEDING)
),
starts AS (
    SELECT rank, median(abs(loss)) AS start FROM usual WHERE number <= $history GROUP BY rank
),
limits AS (
    SELECT
        *, usual + greatest(
            $scatter * 1.4826 * scatter, ($factor - 1) * abs(usual), $part * start
        ) AS threshold
    FROM usual JOIN starts USING (rank)
)
SELECT
    rank, NULL AS module, 'loss' AS tensor, NULL AS path, step AS since, step, loss AS value, threshold,
    format('{:.4g} is usual', usual) AS note
FROM limits
WHERE number > $history AND loss > threshold
QUALIFY coalesce(step > lag(step) OVER (PARTITION BY rank ORDER BY step) + $history, true)
