-- Outbox: messages about approvals and ended runs, written with the change that they report.

-- Writes the message about an approval. It names the session too, so that a client which follows a conversation can
-- match it. Called in the RETURNING of the statement that changed it. People act rarely, so the wake-up is cheap.
CREATE OR REPLACE FUNCTION interlock.announce(news text, about interlock.approval, moment timestamptz) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO interlock.outbox_message (tenant_id, target_id, channel, event, subject_id, payload, created_at, due_at)
  SELECT about.tenant_id, d.id, d.channel, news, about.id,
         CASE WHEN d.channel = 'webhook' THEN jsonb_build_object(
           'approval_id', about.id, 'run_id', about.run_id, 'session_id', about.session_id, 'step_key', about.step,
           'kind', about.kind, 'status', about.status, 'tier', about.tier, 'two_person', about.two_person,
           'digest', about.digest, 'rule_ids', about.rule_ids, 'requested_at', about.requested_at,
           'expires_at', about.expires_at, 'escalated_at', about.escalated_at, 'resolved_at', about.resolved_at
         ) END,
         moment, moment
    FROM interlock.notification_target AS d
   WHERE d.tenant_id = about.tenant_id
     AND d.disabled_at IS NULL
     AND news = ANY(d.events)
     AND (d.workspace_id IS NULL OR d.workspace_id = (SELECT run.workspace_id FROM interlock.run WHERE run.id = about.run_id));
  IF FOUND THEN
    PERFORM pg_notify('interlock.outbox', '');
  END IF;
END $$;
