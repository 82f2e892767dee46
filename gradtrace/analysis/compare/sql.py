"""The queries that align two runs and measure how far apart they are. Views: ``records_a``, ``records_b``."""

from __future__ import annotations

from collections.abc import Collection

_SETTINGS = "('lr', 'loss_scale')"
_BOUNDARY = f"op IS NULL AND phase NOT IN ('event', 'replay') AND tensor NOT IN {_SETTINGS}"

KINDS = f"SELECT DISTINCT dtype, device FROM {{view}} WHERE rank = $rank AND {_BOUNDARY}"

# Watched and thinned steps lack most boundaries, in part even `grad_norm`; see the view `steps`.
STEPS = """
SELECT
    step,
    count(*),
    bool_or(tensor IN ('input', 'grad_output', 'grad')) AND NOT bool_or(tensor = 'grad_norm')
FROM {view}
WHERE rank = $rank AND op IS NULL AND phase <> 'event'
    AND step >= coalesce($first, step) AND step < coalesce($end, step + 1)
GROUP BY step
ORDER BY step
"""

# Hashes are compared in place of six columns. Two of a step's boundaries, some thousands, that share one of 2^64 would
# be taken for occurrences of the same: once in 10^12 steps.
_KEY = "hash(micro_step, phase, module, call, tensor, path)"
_SIDE = f"""
SELECT *, {{occurrence}} AS occurrence
FROM (
    SELECT
        step, full_steps, seq, module, tensor, dtype, shape, device, "min", "max", norm, micro_step,
        coalesce(nan_count, 0) AS nans, coalesce(posinf_count, 0) AS posinfs, coalesce(neginf_count, 0) AS neginfs,
        {_KEY} AS key, {{tolerance}} AS tolerance
    FROM {{view}} JOIN shared_steps USING (step)
    WHERE rank = $rank_{{name}} AND step BETWEEN $first AND $last AND {_BOUNDARY} {{modules}}
)
"""

# To number the occurrences takes as long as all the rest together, and few runs have more than one of anything.
_NUMBERED = "row_number() OVER (PARTITION BY step, key ORDER BY seq)"
REPEATED = f"""
SELECT 1 FROM {{view}}
WHERE rank = $rank AND step BETWEEN $first AND $last AND {_BOUNDARY}
GROUP BY step, {_KEY}
HAVING count(*) > 1
LIMIT 1
"""

# The numbers of a stretch, by module. Where dtypes or devices are the same, those columns are NULL, and the groups few.
_STRETCH = """
WITH a AS ({a}), b AS ({b}),
pairs AS MATERIALIZED (
    SELECT
        a.seq AS seq_a,
        b.seq AS seq_b,
        coalesce(a.step, b.step) AS step,
        coalesce(a.module, b.module) AS module,
        coalesce(a.full_steps, b.full_steps) AS full_steps,
        a.micro_step,
        a.tensor = 'grad' AS is_grad,
        greatest(a.tolerance, b.tolerance) AS tolerance,
        CASE WHEN a.dtype <> b.dtype THEN a.dtype END AS dtype_a,
        CASE WHEN a.dtype <> b.dtype THEN b.dtype END AS dtype_b,
        CASE WHEN a.device <> b.device THEN a.device END AS device_a,
        CASE WHEN a.device <> b.device THEN b.device END AS device_b,
        a.shape IS DISTINCT FROM b.shape AS other_shape,
        a.nans <> b.nans OR a.posinfs <> b.posinfs OR a.neginfs <> b.neginfs
        OR (a."min" IS NULL) <> (b."min" IS NULL) AS other_counts,
        greatest(abs(a."min"), abs(a."max"), abs(b."min"), abs(b."max")) AS magnitude,
        greatest(a.norm, b.norm) AS norm,
        greatest(abs(a."min" - b."min"), abs(a."max" - b."max")) AS apart,
        abs(a.norm - b.norm) AS norms_apart
    FROM a FULL JOIN b ON a.step = b.step AND a.key = b.key AND a.occurrence = b.occurrence
),
grads AS (
    SELECT step, micro_step, module, max(magnitude) AS magnitude, max(norm) AS norm
    FROM pairs
    WHERE is_grad AND seq_b IS NOT NULL
    GROUP BY ALL
),
measured AS (
    SELECT
        pairs.*,
        CASE
            WHEN other_counts THEN 'inf'::DOUBLE
            ELSE coalesce(
                greatest(
                    apart / nullif(coalesce(grads.magnitude, pairs.magnitude), 0),
                    norms_apart / nullif(coalesce(grads.norm, pairs.norm), 0)
                ),
                0
            )
        END AS difference
    FROM pairs LEFT JOIN grads
        ON is_grad AND grads.step = pairs.step AND grads.micro_step = pairs.micro_step AND grads.module = pairs.module
),
judged AS (
    SELECT
        *,
        seq_a IS NOT NULL AND seq_b IS NOT NULL AS matched,
        matched AND (other_shape OR difference > tolerance) AS differs,
        {{
            'difference': difference, 'earliest': -seq_a, 'seq_b': seq_b, 'step': step, 'tolerance': tolerance
        }} AS place
    FROM measured
)
SELECT
    module,
    dtype_a,
    dtype_b,
    device_a,
    device_b,
    {{
        'compared': count(*) FILTER (WHERE matched),
        'differing': count(*) FILTER (WHERE differs),
        'only_a': count(*) FILTER (WHERE seq_b IS NULL AND full_steps),
        'first_only_a': min(step) FILTER (WHERE seq_b IS NULL AND full_steps),
        'only_b': count(*) FILTER (WHERE seq_a IS NULL AND full_steps),
        'first_only_b': min(step) FILTER (WHERE seq_a IS NULL AND full_steps)
    }},
    arg_min(place, seq_a) FILTER (WHERE differs),
    max(place) FILTER (WHERE differs)
FROM judged
GROUP BY ALL
"""

SCALARS = f"""
WITH scalars AS (
    SELECT
        name, step, micro_step, tensor, path, seq,
        CASE WHEN nan_count > 0 THEN 'nan'::DOUBLE WHEN posinf_count > 0 THEN 'inf'::DOUBLE
            WHEN neginf_count > 0 THEN '-inf'::DOUBLE ELSE "max" END AS value,
        row_number() OVER (PARTITION BY name, step, micro_step, tensor, path ORDER BY seq) AS occurrence
    FROM (
        SELECT 'a' AS name, * FROM records_a WHERE rank = $rank_a
        UNION ALL
        SELECT 'b' AS name, * FROM records_b WHERE rank = $rank_b
    )
    SEMI JOIN shared_steps USING (step)
    WHERE tensor IN {_SETTINGS} AND op IS NULL
)
SELECT tensor, path, min(a.step), arg_min(a.value, a.seq), arg_min(b.value, a.seq), count(*)
FROM (FROM scalars WHERE name = 'a') AS a JOIN (FROM scalars WHERE name = 'b') AS b
    USING (step, micro_step, tensor, path, occurrence)
WHERE a.value IS DISTINCT FROM b.value
    AND (
        coalesce(abs(a.value - b.value) > $rtol * greatest(abs(a.value), abs(b.value)), true)
        OR NOT isfinite(a.value - b.value)
    )
GROUP BY tensor, path
ORDER BY min(a.seq)
"""


def stretch(tolerances: dict[str, float], modules: Collection[str] | None, *, numbered: bool) -> str:
    """Return the query for the numbers of a stretch, by module.

    ``tolerances`` are by dtype; with ``modules`` it takes a parameter of that name. ``numbered`` is to be true where a
    run has several records of one boundary.
    """
    return _STRETCH.format(**{name: _side(name, tolerances, modules, numbered) for name in "ab"})


def _side(name: str, tolerances: dict[str, float], modules: Collection[str] | None, numbered: bool) -> str:
    texts = {dtype.replace("'", "''"): tolerance for dtype, tolerance in tolerances.items()}  # a file can hold any text
    cases = "".join(f" WHEN '{dtype}' THEN {tolerance!r}" for dtype, tolerance in texts.items())
    return _SIDE.format(
        name=name,
        view=f"records_{name}",
        occurrence=_NUMBERED if numbered else "1",
        tolerance=f"CASE dtype{cases} END::DOUBLE" if cases else "0::DOUBLE",
        modules="" if modules is None else "AND module IN $modules",
    )
