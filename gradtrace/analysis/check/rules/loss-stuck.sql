-- loss-stuck: The loss does not move
-- severity: note
-- meaning: The loss is the same number step after step, or is at the end of many steps where it was at their start.
--   Nothing is learned: dead units, a learning rate that is too low or too high, a label that does not belong to its
--   input, or an optimizer that has other parameters. Two networks in a game (GAN) and a model that has converged
--   look like this too.
-- mend: See what the other rules say; try to fit a single batch.
-- value: number of steps with the same loss, or relative change of the loss over all steps
-- looks at: the last loss of each step that was handed to backward(), with the loss scale taken out, in full and in
--   watched steps; evaluation has no such loss
-- needs: same
-- threshold same = 10 steps: on end, up to the last, with a loss that is equal to the last bit
-- source same: our choice: other batches give other losses, to some digit
-- threshold steps = 100 steps: so many must there be before a change is asked for
-- source steps: our choice: below that noise hides slow progress
-- threshold change = 0.01 times: by so much one fifth of these steps differs from another, in the median
-- source change: our choice: a loss that goes down changes by more in a hundred steps
WITH losses AS (
    SELECT
        rank, step, loss, row_number() OVER (PARTITION BY rank ORDER BY step) AS number,
        count(*) OVER (PARTITION BY rank) AS steps
    FROM course
    WHERE isfinite(loss)
),
lasts AS (
    SELECT rank, arg_max(loss, step) AS last_loss, max(step) AS last_step FROM losses GROUP BY rank
),
ends AS (
    SELECT rank, last_loss, last_step, coalesce(max(step) FILTER (WHERE loss <> last_loss), -1) AS last_other
    FROM losses JOIN lasts USING (rank)
    GROUP BY ALL
),
fifths AS (
    SELECT
        rank, (number - 1) * 5 // steps AS fifth, median(loss) AS loss, min(step) AS first_step,
        max(step) AS last_step
    FROM losses
    WHERE steps >= $steps
    GROUP BY ALL
)
SELECT
    rank, NULL AS module, 'loss' AS tensor, NULL AS path, min(step) AS since, last_step AS step,
    count(*)::DOUBLE AS value, $same::DOUBLE AS threshold,
    format('{:.6g} in each of {} steps up to the last', last_loss, count(*)) AS note
FROM losses JOIN ends USING (rank)
WHERE step > last_other
GROUP BY rank, last_step, last_loss
HAVING count(*) >= $same
UNION ALL
SELECT
    rank, NULL, 'loss', NULL, min(first_step), max(last_step),
    (max(loss) - min(loss)) / max(abs(loss)), $change::DOUBLE,
    format('{:.4g} at the start, {:.4g} at the end', arg_min(loss, fifth), arg_max(loss, fifth))
FROM fifths
GROUP BY rank
HAVING max(abs(loss)) > 0 AND (max(loss) - min(loss)) < $change * max(abs(loss)) AND max(loss) > min(loss)
