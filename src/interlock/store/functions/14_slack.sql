-- Slack: which tenants may act from a team.

CREATE OR REPLACE FUNCTION interlock.is_in_slack_team(tenant uuid, team text) RETURNS boolean LANGUAGE sql STABLE AS $$
  SELECT EXISTS (SELECT FROM interlock.slack_team WHERE team_id = team AND tenant_id = tenant AND accepted_at IS NOT NULL)
      OR NOT EXISTS (SELECT FROM interlock.slack_team WHERE team_id = team AND accepted_at IS NOT NULL)
         AND EXISTS (SELECT FROM interlock.tenant AS t WHERE t.id = tenant AND t.name = 'default')
$$;
