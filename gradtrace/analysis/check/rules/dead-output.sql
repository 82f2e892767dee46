-- dead-output: A module returns the same number everywhere
-- severity: warning
-- meaning: All elements of the module's output are equal, and have been to the end. With ReLU it is zero, and no
--   gradient comes back through it: it will not recover. Other constants come from a saturated sigmoid, a softmax
--   over one element, or a normalization that has nothing left to divide.
-- mend: Lower the learning rate, use another activation (LeakyReLU, GELU), look at the bias and the normalization
--   before it; for a softmax, at its dimension.
-- value: number of recorded steps with such an output
-- looks at: outputs of more than one element in training, in full steps: evaluation, recomputation and outputs that
--   are not finite are passed over. A module whose inputs are all constant too passes on what is dead before it and
--   is not told, nor one that contains a module that is.
-- needs: steps full
-- threshold steps = 5 steps: so many recorded steps on end, up to the last, in all calls of the module
-- source steps: our choice: branches that start at zero (LoRA, a zero-initialized last layer) move after a step or
--   two
WITH outputs AS (
    FROM seen
    WHERE tensor = 'output' AND phase = 'forward' AND numel > 1 AND nan_count + posinf_count + neginf_count = 0
),
candidates AS (
    SELECT rank, module, path FROM seen WHERE tensor = 'output' AND "min" = "max"
    GROUP BY ALL HAVING count(DISTINCT step) >= $steps
),
ends AS (
    SELECT
        rank, module, path, coalesce(max(step) FILTER (WHERE "min" < "max"), -1) AS last_alive, max(step) AS last_step
    FROM outputs SEMI JOIN candidates USING (rank, module, path)
    GROUP BY ALL
),
dead AS (
    SELECT
        rank, module, path, min(step) AS since, arg_max("max", seq) AS number, count(DISTINCT step) AS steps,
        count(DISTINCT "max") > 1 AS varies, any_value(last_step) AS last_step, arg_max(numel, seq) AS numel
    FROM outputs JOIN ends USING (rank, module, path)
    WHERE step > last_alive
    GROUP BY rank, module, path
    HAVING count(DISTINCT step) >= $steps
),
passed_on AS (
    SELECT dead.rank, dead.module
    FROM dead JOIN seen ON seen.rank = dead.rank AND seen.module = dead.module AND seen.step = dead.last_step
    WHERE seen.tensor = 'input' AND seen.phase IN ('input', 'forward') AND seen.numel > 1 AND seen.norm IS NOT NULL
    GROUP BY ALL
    HAVING bool_and(seen."min" = seen."max")
)
SELECT
    rank, module, 'output' AS tensor, path, since, since AS step, steps::DOUBLE AS value,
    $steps::DOUBLE AS threshold,
    format('up to the last: {} elements that are {:.4g}', numel, number)
    || CASE WHEN varies THEN ' (other numbers in other steps)' ELSE '' END AS note
FROM dead ANTI JOIN passed_on USING (rank, module)
WHERE NOT EXISTS (
    FROM dead AS inner_one
    WHERE inner_one.rank = dead.rank AND inner_one.module <> dead.module
        AND (dead.module = '' OR starts_with(inner_one.module, dead.module || '.'))
)
