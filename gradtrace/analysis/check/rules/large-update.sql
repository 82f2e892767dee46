-- large-update: Updates are large beside the weights
-- severity: warning
-- meaning: The length of the weight changes by so much in every step that the update itself must be at least as large
--   a part of the weight: learning overwrites what was learned. What is computed is a lower bound, the change of the
--   norm by the norm before; the update's own norm is not recorded.
-- mend: Lower the learning rate, warm it up, clip the gradients, look at the scale of the initial weights.
-- value: change of the weight's norm in one step, by the norm before: of the update-to-weight ratio, at least this
--   much
-- looks at: parameters of two dimensions or more after each update, in full steps. Between steps with others in
--   between it is the average of an update. Parameters that started at zero (biases, LoRA's B) are passed over,
--   skipped steps change nothing.
-- needs: steps + 1 full
-- threshold ratio = 0.1 times: a hundred times the usual 1e-3
-- source ratio: the notes of Stanford's CS231n, "Neural Networks Part 3", and Karpathy's lectures have a ratio of
--   about 1e-3 as a rule of thumb; the factor of a hundred is our choice
-- threshold steps = 3 steps: so many recorded steps on end
-- source steps: our choice: the first steps of Adam are large by design
WITH weights AS (
    SELECT rank, step, seq, module, path, norm
    FROM seen
    WHERE tensor = 'param' AND shape LIKE '%,%' AND norm IS NOT NULL AND nan_count + posinf_count + neginf_count = 0
),
candidates AS (
    SELECT rank, module, path FROM weights GROUP BY ALL
    HAVING min(norm) > 0 AND max(norm) >= (1 + $ratio) * min(norm) AND count(*) > $steps
),
changes AS (
    SELECT
        rank, step, module, path, row_number() OVER in_order AS number,
        abs(norm - lag(norm) OVER in_order) / lag(norm) OVER in_order
        / greatest(step - lag(step) OVER in_order, 1) AS change
    FROM weights SEMI JOIN candidates USING (rank, module, path)
    WINDOW in_order AS (PARTITION BY rank, module, path ORDER BY seq)
),
streaks AS (
    SELECT *, number - row_number() OVER (PARTITION BY rank, module, path ORDER BY number) AS streak
    FROM changes
    WHERE change >= $ratio
),
found AS (
    SELECT rank, module, path, min(step) AS since, max(step) AS last_step, max(change) AS value, count(*) AS steps
    FROM streaks
    GROUP BY rank, module, path, streak
    HAVING steps >= $steps
)
SELECT
    rank, module, 'param' AS tensor, path, since, since AS step, value, $ratio AS threshold,
    format('at least, in each of {} steps up to step {}', steps, last_step) AS note
FROM found
QUALIFY row_number() OVER (PARTITION BY rank, module, path ORDER BY since) = 1
