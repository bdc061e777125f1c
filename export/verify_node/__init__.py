"""The sampling of a round as a node of the target's graph, `outrider::Verify`."""
