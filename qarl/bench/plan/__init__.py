"""`qarl bench plan`: the predicted time of a training step on hardware that is not there. Nothing else imports this."""
