-- vanishing-gradients: A module hardly gets a gradient
-- severity: warning
-- meaning: The gradient of the module's parameters is next to nothing beside that of other modules, and has stayed so
--   to the end: it does not learn. Saturated sigmoids and tanhs, dead ReLUs, a path that was cut off, or a depth
--   without residual connections or normalization do this.
-- mend: Look at the activations behind it (dead-output), use residual connections, normalization, or an
--   initialization made for the activation function.
-- value: root mean square of the module's gradients, by that of the module with the largest in the same step
-- looks at: gradients as they arrive, all parameters of a module together, in full steps. The ratio is free of the
--   loss scale. Steps in which the module has no gradient do not count. With accumulation it is the last pass of a
--   step.
-- needs: steps full
-- threshold ratio = 1e-7 times: the largest module's
-- source ratio: our choice, about the eps of float32 (1.2e-7): what is smaller is lost when the two are added. The
--   modules of a healthy model lie within a few powers of ten; Glorot and Bengio, "Understanding the difficulty of
--   training deep feedforward neural networks" (2010) show how gradients shrink from layer to layer
-- threshold steps = 5 steps: so many recorded steps on end, up to the last
-- source steps: our choice: layers that start at zero need a step or two
WITH sizes AS (
    SELECT
        rank, step, module, norm / sqrt(numel) AS size,
        max(norm / sqrt(numel)) OVER (PARTITION BY rank, step) AS largest
    FROM module_grads
    WHERE isfinite(norm) AND numel > 0
),
candidates AS (
    SELECT rank, module FROM sizes WHERE size < $ratio * largest GROUP BY ALL HAVING count(*) >= $steps
),
ends AS (
    SELECT rank, module, coalesce(max(step) FILTER (WHERE size >= $ratio * largest), -1) AS last_good
    FROM sizes SEMI JOIN candidates USING (rank, module)
    GROUP BY ALL
)
SELECT
    rank, module, 'grad' AS tensor, NULL AS path, min(step) AS since, min(step) AS step, max(size / largest) AS value,
    $ratio AS threshold,
    CASE WHEN max(size) = 0 THEN 'all zero' ELSE format('at most {:.3g} a parameter', max(size)) END
    || format(', in {} steps up to the last', count(*)) AS note
FROM sizes JOIN ends USING (rank, module)
WHERE step > last_good
GROUP BY rank, module
HAVING count(*) >= $steps
