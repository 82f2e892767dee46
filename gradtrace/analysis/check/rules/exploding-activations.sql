-- exploding-activations: A module's output grows without bound
-- severity: warning
-- meaning: The output's largest element is many times what it was in the first steps, and well above what any module
--   had then. It is what comes before an overflow, in float16 soon, in float32 after a loss that has long been lost.
-- mend: Normalize, lower the learning rate, use weight decay; look at the module that is named first.
-- value: the largest magnitude of the output
-- looks at: floating-point outputs in training, in full steps; evaluation and recomputation are passed over, and
--   outputs of one element, which are losses. Growth is counted from the step after the last one that was below twice
--   the first steps' median. Of boundaries that one tensor passes in one step, the first is told.
-- needs: history + 1 full
-- threshold factor = 100 times: against the median of the module's first steps
-- source factor: our choice: logits of a healthy classifier grow tenfold and more
-- threshold above = 10 times: against the largest of these medians over all modules, those aside whose first steps do
--   not differ (a mask), so that a branch that starts at zero may grow
-- source above: our choice, for the same reason
-- threshold history = 5 steps: so many full steps are the first ones
-- source history: our choice: a median of fewer says little
WITH outputs AS (
    SELECT rank, step, seq, module, path, extreme
    FROM seen
    WHERE tensor = 'output' AND phase = 'forward' AND numel > 1 AND norm IS NOT NULL
),
first_steps AS (
    SELECT rank, max(step) AS last_step
    FROM (
        SELECT rank, step, row_number() OVER (PARTITION BY rank ORDER BY step) AS number FROM course WHERE in_full
    )
    WHERE number <= $history
    GROUP BY rank
),
usual AS (
    -- An output whose largest element never differs is one with a fill (a mask): no measure for the others.
    SELECT rank, module, path, median(extreme) AS usual, min(extreme) = max(extreme) AS is_fill
    FROM outputs JOIN first_steps USING (rank)
    WHERE step <= last_step
    GROUP BY rank, module, path
),
limits AS (
    SELECT
        rank, module, path, usual,
        greatest($factor * usual, $above * max(usual) FILTER (WHERE NOT is_fill) OVER (PARTITION BY rank)) AS threshold
    FROM usual
),
crossings AS (
    SELECT rank, module, path, usual, threshold, min(step) AS step, arg_min(extreme, seq) AS value, min(seq) AS seq
    FROM outputs JOIN limits USING (rank, module, path) JOIN first_steps USING (rank)
    WHERE step > last_step AND usual > 0 AND extreme >= threshold
    GROUP BY rank, module, path, usual, threshold
),
firsts AS (
    FROM crossings QUALIFY row_number() OVER (PARTITION BY rank, step, value ORDER BY seq) = 1
),
ends AS (
    SELECT rank, module, path, coalesce(max(o.step) FILTER (WHERE o.extreme < 2 * usual), -1) AS last_usual
    FROM firsts JOIN outputs AS o USING (rank, module, path)
    WHERE o.step < firsts.step
    GROUP BY rank, module, path
)
SELECT
    rank, module, 'output' AS tensor, path, min(o.step) AS since, firsts.step, value, threshold,
    format('{:.3g} times its first steps', value / usual) AS note
FROM firsts JOIN ends USING (rank, module, path) JOIN outputs AS o USING (rank, module, path)
WHERE o.step > last_usual
GROUP BY rank, module, path, firsts.step, value, threshold, usual
