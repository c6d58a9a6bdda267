-- What is told of an approval names its session too: whoever follows a conversation knows which one it is about.

CREATE OR REPLACE FUNCTION announce(news text, about approval, moment timestamptz) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO outbox (tenant_id, destination_id, channel, event, subject_id, payload, created_at, due_at)
  SELECT about.tenant_id, d.id, d.channel, news, about.id,
         CASE WHEN d.channel = 'webhook' THEN jsonb_build_object(
           'approval_id', about.id, 'run_id', about.run_id, 'session_id', about.session_id, 'step_key', about.step,
           'kind', about.kind, 'status', about.status, 'tier', about.tier, 'two_person', about.two_person,
           'digest', about.digest, 'rule_ids', about.rule_ids, 'requested_at', about.requested_at,
           'expires_at', about.expires_at, 'escalated_at', about.escalated_at, 'resolved_at', about.resolved_at
         ) END,
         moment, moment
    FROM destination AS d
   WHERE d.tenant_id = about.tenant_id
     AND d.disabled_at IS NULL
     AND news = ANY(d.events)
     AND (d.workspace_id IS NULL OR d.workspace_id = (SELECT run.workspace_id FROM run WHERE run.id = about.run_id));
  IF FOUND THEN
    PERFORM pg_notify('interlock_outbox', '');
  END IF;
END $$;
