"""Operations inside of a step: seen, judged, named and placed in the user's code."""
