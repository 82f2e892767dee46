-- lost-update: Updates are too small for the weights' type
-- severity: warning
-- meaning: Half the gap between neighbouring numbers of the weight's type is more than a usual step of the optimizer:
--   most of what it adds is rounded away. The step itself is not recorded; it is estimated generously, as the larger
--   of what Adam would do (the learning rate for every element) and SGD with a momentum of 0.9 (ten times learning
--   rate times gradient), by the medians of the run.
-- mend: Keep the weights in float32 (torch.autocast instead of model.bfloat16() or .half()), or use an optimizer that
--   keeps float32 copies or rounds stochastically: if yours does, this is no finding.
-- value: estimated update-to-weight ratio, at most about this much
-- looks at: parameters with gradients, in full steps; the learning rate is that of the fastest group. Gradients have
--   the loss scale taken out. LAMB, LARS and others that scale the learning rate by the weight's norm are not
--   covered.
-- needs: steps full
-- threshold share = 1 times: half the gap between neighbouring numbers of the weight's type, relative to a number
--   where it is smallest: float16 2^-12, bfloat16 2^-9, float32 2^-25, float64 2^-54
-- source share: the formats: rounding to nearest drops what is less than half the gap, which is
--   torch.finfo(dtype).eps / 4 of a number just below a power of two
-- threshold steps = 5 steps: so many full steps must have been recorded
-- source steps: our choice: medians of fewer say little
WITH roundoffs AS (
    FROM (VALUES ('float16', 2.0 ** -12), ('bfloat16', 2.0 ** -9), ('float32', 2.0 ** -25), ('float64', 2.0 ** -54))
    AS t (dtype, roundoff)
),
rates AS (
    SELECT rank, median(lr) AS lr FROM course WHERE isfinite(lr) AND lr > 0 GROUP BY rank
),
gradients AS (
    SELECT rank, module, median(norm) AS norm FROM module_grads WHERE isfinite(norm) AND norm > 0 GROUP BY rank, module
),
bounds AS (  -- the largest norm gives the smallest ratio: what is not below the threshold with it never is
    SELECT
        rank, module, path, dtype, lr, $share * roundoff AS threshold,
        lr * greatest(sqrt(any_value(numel)), 10 * gradients.norm) AS change
    FROM seen JOIN gradients USING (rank, module) JOIN rates USING (rank) JOIN roundoffs USING (dtype)
    WHERE tensor = 'param' AND phase = 'optimizer' AND seen.norm > 0
    GROUP BY rank, module, path, dtype, lr, roundoff, gradients.norm
    HAVING count(*) >= $steps AND change / max(seen.norm) < threshold
)
SELECT
    rank, module, 'param' AS tensor, path, min(step) AS since, max(step) AS step, change / median(norm) AS value,
    threshold,
    format('{} weights, learning rate {:.3g}', dtype, lr) AS note
FROM seen JOIN bounds USING (rank, module, path, dtype)
WHERE tensor = 'param' AND phase = 'optimizer' AND norm > 0
    AND (rank, module, path) IN (SELECT (rank, module, path) FROM seen WHERE tensor = 'grad')
GROUP BY rank, module, path, dtype, lr, change, threshold
HAVING value < threshold
