"""What a publish to an engine in another process or on another host needs besides `qarl.rollout.publish`."""
