-- near-overflow: A value is close to the largest that its type holds
-- severity: serious
-- meaning: The next doubling or two make an infinity of it. In float16, which ends at 65504, this is the usual way to
--   a NaN: sums of squares, attention scores and residual streams outgrow it while nothing else looks wrong.
-- mend: Compute that part in bfloat16 or float32, divide before multiplying, normalize earlier; in backward, lower
--   the loss scale.
-- value: the largest magnitude at the boundary
-- looks at: every boundary in full steps, evaluation and recomputation included, the outputs of outermost modules in
--   watched steps. A magnitude that is the limit of a type itself, or the same in every step, is a fill (a mask), no
--   computed value. float16 gradients are passed over in steps with a loss scale: GradScaler goes to the limit on
--   purpose and backs off. Of boundaries that one tensor passes in one step, the first is told.
-- needs: 1
-- threshold factor = 4 times: so many times the magnitude reaches the type's limit
-- source factor: our choice: two doublings. The limits are those of the formats: float16 65504, bfloat16 3.39e38,
--   float32 3.40e38, float64 1.80e308 (IEEE 754 for all but bfloat16; torch.finfo(dtype).max)
WITH limits AS (
    FROM (VALUES
        ('float16', 65504.0), ('complex32', 65504.0), ('bfloat16', 3.3895313892515355e38),
        ('float32', 3.4028234663852886e38), ('complex64', 3.4028234663852886e38),
        ('float64', 1.7976931348623157e308), ('complex128', 1.7976931348623157e308)
    ) AS t (dtype, most)
),
near AS (
    SELECT rank, step, seq, module, tensor, path, phase, dtype, extreme, most
    FROM seen JOIN limits USING (dtype)
    WHERE extreme >= 65504 / $factor AND extreme >= most / $factor
        AND extreme NOT IN (SELECT most FROM limits)
        AND tensor IN ('input', 'output', 'grad_input', 'grad_output', 'grad', 'param', 'buffer', 'loss')
        AND NOT (
            phase = 'backward' AND dtype IN ('float16', 'complex32')
            AND (rank, step) IN (SELECT (rank, step) FROM scales)
        )
),
places AS (
    SELECT
        rank, module, tensor, path, min(step) AS since, arg_min(extreme, seq) AS value, min(seq) AS seq,
        max(extreme) AS worst, arg_max(step, extreme) AS worst_step, any_value(most) AS most, any_value(dtype) AS dtype,
        count(DISTINCT step) AS steps
    FROM near
    GROUP BY rank, module, tensor, path
    HAVING steps = 1 OR min(extreme) < max(extreme)
)
SELECT
    rank, module, tensor, path, since, since AS step, value, most / $factor AS threshold,
    format('{}, which ends at {:.6g}', dtype, most)
    || CASE WHEN worst > value THEN format('; {:.6g} at step {}', worst, worst_step) ELSE '' END AS note
FROM places
QUALIFY row_number() OVER (PARTITION BY rank, since, value ORDER BY seq) = 1
